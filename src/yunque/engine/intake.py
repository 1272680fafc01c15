"""What a request must satisfy before it may wait, and the sequence that is made of it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from itertools import count

from yunque.core.seeds import Seeds
from yunque.engine.constraints import Constraints, Matcher
from yunque.engine.penalties import Penalties
from yunque.engine.sampler import RowSampling
from yunque.engine.sequence import Sequence
from yunque.engine.settings import EngineSettings
from yunque.engine.stops import StopWatch
from yunque.model.config import ModelConfig
from yunque.protocol.errors import ContextLengthExceeded, RequestError
from yunque.protocol.generation import Constraint, GenerationRequest
from yunque.text import Tokenizer


class Intake:
    """Checks requests and prepares them. It knows nothing of what runs, so any thread may call it."""

    def __init__(
        self, config: ModelConfig, settings: EngineSettings, *, num_pages: int, tokenizer: Tokenizer | None
    ) -> None:
        self._vocab_size = config.vocab_size
        self._settings = settings
        self._tokenizer = tokenizer
        wanted = settings.max_model_len or config.max_position_embeddings
        #: The most tokens, prompt and reply, that a request can have.
        self.max_model_len = min(wanted, config.max_position_embeddings, num_pages * settings.page_size)
        self._constraints = None if tokenizer is None else Constraints(tokenizer)
        self._seeds = Seeds(settings.seed)
        self._numbers = count(1)

    def check(self, request: GenerationRequest) -> int:
        """The most tokens that ``request`` can come to. Raises ``RequestError`` or ``ContextLengthExceeded``."""
        params = request.sampling
        if not request.tokens:
            raise RequestError("the prompt has no tokens; at least one is needed", param="prompt")
        lowest, highest = min(request.tokens), max(request.tokens)
        if not 0 <= lowest <= highest < self._vocab_size:
            worst = lowest if lowest < 0 else highest
            raise RequestError(f"token id {worst} is outside 0..{self._vocab_size - 1}", param="prompt")
        limit, num_prompt, num_given = self.max_model_len, request.num_prompt, len(request.tokens)
        if num_given + (params.max_new_tokens != 0 and num_given == num_prompt) > limit:
            raise ContextLengthExceeded(
                f"the prompt has {num_given} tokens; with what is to be made it exceeds the context of {limit}",
                param="prompt",
            )
        if params.max_new_tokens is not None and num_prompt + params.max_new_tokens > limit:
            raise ContextLengthExceeded(
                f"{num_prompt} prompt tokens and max_new_tokens {params.max_new_tokens} exceed the context of {limit}",
                param="max_tokens",
            )
        if request.reply_start is not None:
            self._check_resumption(request)
        if (params.stop or params.constraint) and self._tokenizer is None:
            raise RequestError("stop strings and constraints need an engine with a tokenizer", param="stop")
        return limit if params.max_new_tokens is None else num_prompt + params.max_new_tokens

    def _check_resumption(self, request: GenerationRequest) -> None:
        made, most = len(request.tokens) - request.num_prompt, request.sampling.max_new_tokens
        if not 0 < request.num_prompt <= len(request.tokens):
            raise RequestError(
                f"reply_start is {request.reply_start}; it must be between 1 and the number of tokens", param="prompt"
            )
        if most is not None and made > most:
            raise RequestError(
                f"resume_token_ids has {made} ids, more than max_tokens {most}", param="resume_token_ids"
            )
        if request.prompt_logprobs:
            raise RequestError(
                "log-probabilities of the prompt are not given again when a reply is resumed", param="resume_token_ids"
            )

    def prepare(self, request: GenerationRequest) -> Sequence:
        """Check ``request`` and make what it needs; changes nothing, so any thread may call it.

        Raises ``RequestError`` for one that cannot be served.
        """
        total, params = self.check(request), request.sampling
        prompt, made = request.tokens[: request.num_prompt], request.tokens[request.num_prompt :]
        seed = params.seed if params.seed is not None else self._seeds.stream("sampler", next(self._numbers))
        row = RowSampling(
            params,
            seed,
            len(prompt),
            penalties=Penalties(params, prompt, self._vocab_size) if Penalties.are_needed(params) else None,
            barred_ids=tuple(params.stop_ids) if params.min_new_tokens else (),
        )
        sequence = Sequence(
            request=request,
            max_total=total,
            row=row,
            page_size=self._settings.page_size,
            watch=StopWatch(self._tokenizer, params.stop) if params.stop and self._tokenizer is not None else None,
            matcher=self._matcher(params.constraint, prompt),
        )
        sequence.resume(made)
        return sequence

    def compile(self, constraint: Constraint) -> None:
        """Have the grammar of ``constraint`` at hand when ``prepare`` needs it. Raises ``RequestError``."""
        if self._constraints is not None:
            self._constraints.compile(constraint, after_reasoning=False)

    def _matcher(self, constraint: Constraint | None, prompt: Tokens[int]) -> Matcher | None:
        if constraint is None or self._constraints is None or self._tokenizer is None:
            return None
        return self._constraints.compile(constraint, after_reasoning=_ends_in_thought(prompt, self._tokenizer))


def _ends_in_thought(tokens: Tokens[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt leaves ``<think>`` open, so that the reply starts inside a thought."""
    opening, closing = tokenizer.find("<think>"), tokenizer.find("</think>")
    last = next((token for token in reversed(tokens) if token in (opening, closing)), None)
    return last is not None and last == opening
