"""The policy client of an engine in the same process."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from yunque.engine.engine import Engine
from yunque.protocol.generation import Completion, GenerationRequest, SamplingParams


class LocalPolicyClient:
    """``protocol.generation.PolicyClient`` over an engine; closing it leaves the engine open."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, session: str | None = None) -> Completion:
        """One reply; a cancelled call aborts it. Raises ``RequestError``, ``Overloaded``, ``EngineUnavailable``."""
        return await self._engine.complete(GenerationRequest(uuid.uuid4().hex, tuple(tokens), sampling, session))

    async def score(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Log-probability of every token but the first under ``sampling``'s distribution."""
        request = GenerationRequest(
            uuid.uuid4().hex, tuple(tokens), replace(sampling, max_new_tokens=0), prompt_logprobs=True
        )
        completion = await self._engine.complete(request)
        assert completion.prompt_logprobs is not None
        return completion.prompt_logprobs

    async def close(self) -> None:
        """Nothing is held."""
