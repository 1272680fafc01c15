"""One request while it lives in the engine: its tokens, pages and rows, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np
import torch

from yunque.engine.constraints import Matcher
from yunque.engine.page_store import Span
from yunque.engine.pages import pages_for
from yunque.engine.penalties import Penalties
from yunque.engine.sampler import RowSampling
from yunque.engine.scheduler import Rank
from yunque.engine.stops import StopWatch
from yunque.protocol.errors import RequestError
from yunque.protocol.generation import Finish, GenerationRequest, TokenDelta, TopToken


@dataclass(frozen=True)
class NewToken:
    """A token that the sampler gave a sequence, and what is told about it."""

    token: int
    logprob: float
    model_logprob: float
    top: tuple[TopToken, ...] | None = None
    kept: tuple[int, ...] | None = None


@dataclass(eq=False)
class Sequence:
    """A request's state, changed by the engine alone.

    ``tokens``: prompt (the first ``num_prompt``) and reply. Rows of the first ``num_computed`` exist in the main
    layers' pages. ``drafts`` are proposed to follow the last token, ``draft_laws`` their distributions where the
    acceptance rule needs them; ``masks`` are what a constraint leaves after the last token and after each draft.
    """

    request: GenerationRequest
    max_total: int
    row: RowSampling
    page_size: int
    watch: StopWatch | None = None
    matcher: Matcher | None = None
    rank: Rank = field(default_factory=lambda: Rank(0, 0))
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    num_computed: int = 0
    num_pages: int = 0
    is_run: bool = True
    drafts: tuple[int, ...] = ()
    masks: list[np.ndarray | None] = field(default_factory=list)
    draft_laws: torch.Tensor | None = None
    cached_tokens: int | None = None
    drafted: int = 0
    accepted: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    _pages: np.ndarray = field(init=False)
    _told: bool = False
    _new: list[tuple[NewToken, int]] = field(default_factory=list)
    finish: Finish | None = None
    stopped_by: str | int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.num_prompt = self.request.num_prompt
        self.tokens = list(self.request.tokens[: self.num_prompt])
        self._pages = np.zeros(pages_for(self.max_total, self.page_size), np.int64)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def pages(self) -> np.ndarray:
        """Its pages in order, int64."""
        return self._pages[: self.num_pages]

    @property
    def capacity(self) -> int:
        """Positions that its pages can hold."""
        return self.num_pages * self.page_size

    def add_pages(self, pages: Tokens[int]) -> None:
        """Append pages, and note whether all still lie in a row."""
        if not pages:
            return
        before = int(self._pages[self.num_pages - 1]) if self.num_pages else pages[0] - 1
        self._pages[self.num_pages : self.num_pages + len(pages)] = pages
        self.num_pages += len(pages)
        self.is_run = self.is_run and list(pages) == list(range(before + 1, before + 1 + len(pages)))

    def replace_pages(self, pages: Tokens[int]) -> None:
        """Hold these pages instead (copies of the same rows)."""
        self.forget_pages()
        self.add_pages(pages)

    def forget_pages(self) -> None:
        """Hold none; whoever calls has released them."""
        self.num_pages, self.is_run = 0, True

    def restart(self) -> None:
        """Nothing is computed any more: all rows are made again, the tokens stay."""
        if len(self.prompt_logprobs) < self.num_prompt - 1:
            self.prompt_logprobs.clear()
        self.num_computed = 0
        self.drafts, self.draft_laws = (), None

    def span(self, start: int, count: int) -> Span:
        """``count`` positions from ``start`` on, in its pages."""
        return Span(self.pages, start, count, self.is_run)

    def rows(self, num_drafts: int) -> list[RowSampling]:
        """How the rows after the last token and after each of ``num_drafts`` drafts are drawn."""
        rows = [self.row]
        self.row.position = len(self.tokens)
        if num_drafts:
            rows = [self.row_after(self.drafts[:i]) for i in range(num_drafts + 1)]
        for row, mask in zip(rows, self.masks, strict=False):
            row.allowed_V = mask
        return rows

    def row_after(self, drafts: tuple[int, ...]) -> RowSampling:
        """How the token after these drafts is drawn."""
        row, params = self.row, self.request.sampling
        num_new = len(self.tokens) + len(drafts) - self.num_prompt
        return RowSampling(
            params,
            row.seed,
            len(self.tokens) + len(drafts),
            penalties=row.penalties,
            barred_ids=row.barred_ids if num_new < params.min_new_tokens else (),
            drafts=drafts,
        )

    def add(self, new: NewToken, version: int) -> bool:
        """Take a sampled token; whether the sequence goes on after it."""
        self._new.append((new, version))
        is_allowed = self._read(new.token)
        assert is_allowed, f"request {self.id}: the constraint did not allow token {new.token}"
        return self.finish is None

    def resume(self, made: Tokens[int]) -> None:
        """Take the beginning of a reply that was made elsewhere, as if it had been sampled here. Raises
        ``RequestError`` if it cannot have been, or goes on behind its end."""
        for index, token in enumerate(made):
            if self.finish is not None:
                raise RequestError(
                    f"resume_token_ids goes on after the reply's end: {index} ids are all of it",
                    param="resume_token_ids",
                )
            if not self._read(token):
                raise RequestError(
                    f"resume_token_ids[{index}] is {token}, which the constraint does not allow there",
                    param="resume_token_ids",
                )

    def _read(self, token: int) -> bool:
        """Note the reply's next token, and whether it ends the reply; False if the constraint forbids it."""
        params = self.request.sampling
        self.tokens.append(token)
        penalties: Penalties | None = self.row.penalties
        if penalties is not None:
            penalties.observe(token)
        num_new = len(self.tokens) - self.num_prompt
        if num_new >= params.min_new_tokens:
            self.row.barred_ids = ()
        if token in params.stop_ids:
            self.finish, self.stopped_by = Finish.STOP, token
        elif self.watch is not None and (match := self.watch.feed(token)) is not None:
            self.finish, self.stopped_by = Finish.STOP, match.stop
        elif self.matcher is not None and not self.matcher.accept(token):
            return False
        elif len(self.tokens) >= self.max_total:
            self.finish = Finish.LENGTH
        return True

    def take_delta(self) -> TokenDelta | None:
        """What is new since the last call, or ``None``."""
        if not self._new and self.finish is None:
            return None
        new, self._new = self._new, []
        params = self.request.sampling
        first, self._told = not self._told, True
        asked = self.request.prompt_logprobs
        return TokenDelta(
            tokens=tuple(n.token for n, _ in new),
            logprobs=tuple(n.logprob for n, _ in new),
            model_logprobs=tuple(n.model_logprob for n, _ in new),
            versions=tuple(version for _, version in new),
            top=tuple(n.top or () for n, _ in new) if params.num_top else (),
            kept=tuple(n.kept for n, _ in new) if params.record_kept else (),
            finish=self.finish,
            stopped_by=self.stopped_by,
            cached_tokens=(self.cached_tokens or 0) if first else None,
            prompt_logprobs=tuple(self.prompt_logprobs) if first and asked else None,
            drafted=self.drafted,
            accepted=self.accepted,
            error=self.error,
        )
