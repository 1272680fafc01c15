"""A reply to a bare prompt (completions and token endpoints): submitted, and read as plain text."""

import uuid
from dataclasses import dataclass, replace

from yunque.protocol.generation import GenerationRequest, SamplingParams, TokenDelta
from yunque.serve.context import ServeContext
from yunque.serve.conversation import TurnSteps
from yunque.serve.text_reader import TextReader


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt as ids, and how it is submitted. ``logprobs``: its own log-probabilities are wanted too. The reply
    begins with the ids ``resumed``; ``shows_resumed``: it is told from there on, not only what follows them."""

    tokens: tuple[int, ...]
    session: str | None = None
    priority: int = 0
    logprobs: bool = False
    cache_salt: str | None = None
    resumed: tuple[int, ...] = ()
    shows_resumed: bool = True


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
        tokens=prompt.tokens + prompt.resumed,
        sampling=sampling,
        session=prompt.session,
        priority=prompt.priority,
        prompt_logprobs=prompt.logprobs,
        cache_salt=prompt.cache_salt,
        reply_start=len(prompt.tokens) if prompt.resumed else None,
    )
    reader = TextReader(context.renderer.tokenizer, sampling.stop, has_special=has_special)
    shown = prompt.resumed if prompt.shows_resumed else ()
    if prompt.resumed and not shown:
        reader.read(TokenDelta(tokens=prompt.resumed))
    steps = TurnSteps(context.service.submit(request), reader, len(prompt.tokens), context.metrics, resumed=shown)
    context.conversations.live[request.id] = steps
    return steps
