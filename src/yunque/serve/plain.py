"""A reply to a bare prompt (completions and token endpoints): submitted, and read as plain text."""

import uuid
from dataclasses import dataclass, replace

from yunque.protocol.generation import GenerationRequest, SamplingParams
from yunque.serve.context import ServeContext
from yunque.serve.conversation import TurnSteps
from yunque.serve.text_reader import TextReader


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt as ids, and how it is submitted. ``logprobs``: its own log-probabilities are wanted too."""

    tokens: tuple[int, ...]
    session: str | None = None
    priority: int = 0
    logprobs: bool = False


def start_plain(
    context: ServeContext,
    prompt: PlainPrompt,
    sampling: SamplingParams,
    *,
    request_id: str | None = None,
    choice: int = 0,
    has_special: bool = False,
) -> TurnSteps:
    """Submit a prompt at once; raises what ``EngineService.submit`` raises. Each choice has its own seed."""
    if sampling.seed is not None and choice:
        sampling = replace(sampling, seed=sampling.seed + choice)
    request = GenerationRequest(
        id=f"{request_id or uuid.uuid4().hex}-{choice}",
        tokens=prompt.tokens,
        sampling=sampling,
        session=prompt.session,
        priority=prompt.priority,
        prompt_logprobs=prompt.logprobs,
    )
    reader = TextReader(context.renderer.tokenizer, sampling.stop, has_special=has_special)
    steps = TurnSteps(context.service.submit(request), reader, len(prompt.tokens), context.metrics)
    context.conversations.live[request.id] = steps
    return steps
