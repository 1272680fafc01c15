"""The policy client of our own server: SGLang's shape with versions and kept sets of every token."""

from collections.abc import Sequence
from dataclasses import replace

from yunque.protocol.clients.replies import is_idempotent, read_reply, require_equal
from yunque.protocol.clients.settings import HttpSettings
from yunque.protocol.clients.sglang import PATH, GenerateReply, completion_of, generate_body, score, sglang_fields
from yunque.protocol.clients.transport import JsonTransport
from yunque.protocol.generation import Completion, SamplingParams
from yunque.protocol.vllm import SESSION_HEADER

_SERVER = "Yunque"


class YunqueClient:
    """``PolicyClient`` over ``yunque serve`` or ``yunque route``.

    Replies and scores are those of the engine in process: log-probabilities under the distribution that the tokens
    were drawn from, the version of every token, kept sets where asked for. What the wire has no field for
    (``ToolConstraint``) is refused.
    """

    def __init__(self, base_url: str, settings: HttpSettings | None = None) -> None:
        self._transport = JsonTransport(base_url, settings)

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, session: str | None = None) -> Completion:
        """One reply. Raises ``RequestError``, ``Overloaded``, ``EngineUnavailable``, ``UnusableReply``."""
        fields = sglang_fields(sampling) | {"ignore_eos": True, "record_kept": sampling.record_kept}
        body = generate_body(tokens, fields, num_top=sampling.num_top)
        headers = {} if session is None else {SESSION_HEADER: session}
        answer = await self._transport.post(PATH, body, headers=headers, is_idempotent=is_idempotent(sampling))
        reply = read_reply(GenerateReply, answer, server=_SERVER)
        completion = completion_of(
            reply, tokens, reply.meta_info.weight_versions or (), num_top=sampling.num_top, server=_SERVER
        )
        if sampling.record_kept and completion.tokens:
            require_equal("kept" in completion.columns, True, "kept sets were asked for", server=_SERVER)
        return completion

    async def score(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Log-probability of every token but the first, under ``sampling``'s distribution."""
        fields = sglang_fields(replace(sampling, max_new_tokens=0)) | {"ignore_eos": True}
        return await score(self._transport, tokens, fields, server=_SERVER)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()
