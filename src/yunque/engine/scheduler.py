"""What the next engine step computes: pure decisions on plain records, in one order that nobody can be starved by.

Every request has a ``Rank``; a smaller one goes first, everywhere. One level of priority is worth ``aging_steps``
steps of waiting, so effective priority grows with time at the same rate for all and the order between two requests
never changes: a request that has waited ``aging_steps`` times the difference in priority is overtaken by nobody new.

A step is filled in this order: one token for each decode, chunks of started prefills, admissions, drafts. Where
pages lack, drafts go first, then admissions and chunks, and only for the next token of a decode (or of the
best-ranked request) are others preempted, worst rank first. The best-ranked running request is never preempted and
always moves on; so it finishes, then the next one is the best.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from yunque.engine.pages import pages_for


class Rank(NamedTuple):
    """A request's place in every order; it keeps it for life, preempted or not."""

    due_step: int
    number: int

    @staticmethod
    def of(*, priority: int, step: int, number: int, aging_steps: int) -> "Rank":
        """The rank of the ``number``-th request, submitted at engine step ``step``: each level of ``priority`` puts
        it as far ahead as arriving ``aging_steps`` steps earlier would."""
        return Rank(step - priority * aging_steps, number)


@dataclass(frozen=True)
class Waiting:
    """A request that holds no pages.

    ``num_known`` tokens are to be computed: prompt, and after a preemption what was sampled. The tree holds the first
    ``num_cached`` of them (whole pages, fewer than all tokens), ``num_idle_pages`` of those pages held by nobody else.
    """

    id: str
    rank: Rank
    num_known: int
    num_cached: int = 0
    num_idle_pages: int = 0


@dataclass(frozen=True)
class Running:
    """An admitted request: rows of its first ``num_computed`` tokens exist; it holds ``num_pages`` pages.

    With one token left to compute it decodes (the token sampled last), with more it prefills. Up to ``num_drafts``
    drafts can be verified behind the next token.
    """

    id: str
    rank: Rank
    num_computed: int
    num_known: int
    num_pages: int
    num_drafts: int = 0

    @property
    def num_left(self) -> int:
        return self.num_known - self.num_computed


@dataclass(frozen=True)
class Resources:
    """Pages that are free, and cached ones that can be evicted; ``page_size`` tokens each."""

    free_pages: int
    evictable_pages: int
    page_size: int


@dataclass(frozen=True)
class Limits:
    """Bounds of one step: ``max_running`` requests, ``max_step_tokens`` tokens, ``max_drafts`` drafts a request, and
    beside decodes ``chunk_tokens`` tokens of prompts, so that a long prompt delays no decode by more.

    A request is admitted beside others only if ``watermark_pages`` stay, for those that run to grow into.
    """

    max_running: int
    max_step_tokens: int
    chunk_tokens: int
    max_drafts: int = 0
    watermark_pages: int = 0

    def __post_init__(self) -> None:
        for name in ("max_running", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("max_drafts", "watermark_pages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 0")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} is below max_running {self.max_running}: "
                "not every running request could make its token"
            )


@dataclass(frozen=True)
class Decode:
    """Compute ``num_tokens`` tokens of a request: the last sampled one and ``num_tokens - 1`` drafts."""

    id: str
    num_tokens: int


@dataclass(frozen=True)
class Chunk:
    """Compute tokens ``start`` to ``start + count - 1`` of a request's known ones."""

    id: str
    start: int
    count: int


@dataclass(frozen=True)
class Plan:
    """One step, carried out in this order: release the pages of ``preempt`` (back into the queue under their rank),
    match the prefixes of ``admit``, evict until ``num_new_pages`` are free, allocate, run ``decode`` and ``prefill``.

    There is a chunk for each admitted request. The pages always suffice. A running request that is in neither list
    waits for pages, or for tokens of the step.
    """

    decode: tuple[Decode, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    admit: tuple[str, ...] = ()
    preempt: tuple[str, ...] = ()
    num_new_pages: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(decode.num_tokens for decode in self.decode) + sum(chunk.count for chunk in self.prefill)


def fits(max_total: int, *, num_pages: int, page_size: int) -> bool:
    """Whether a request of at most ``max_total`` tokens (prompt and reply) can run to its end, alone if it must, in a
    cache of ``num_pages`` usable pages. One that cannot is to be refused when it is submitted."""
    return pages_for(max_total, page_size) <= num_pages


def plan(
    waiting: Iterable[Waiting],
    running: Sequence[Running],
    resources: Resources,
    limits: Limits,
    *,
    reclaimable: Callable[[str], int],
) -> Plan:
    """Decide one step.

    ``waiting`` comes in order of rank (``WaitingQueue``) and is read no further than the first that is not admitted:
    it is not overtaken, however small the next one is. ``reclaimable(id)`` says how many pages at least would become
    free or evictable if that request let go of its own; it is asked only about requests that are preempted. The cost
    is that of sorting ``running``, and one move for each of them and each admitted request.
    """
    step = _Step(sorted(running, key=lambda request: request.rank), resources, limits)
    step.place_next_tokens(reclaimable)
    step.place_chunks()
    if not step.preempted:
        step.admit(waiting)
    return Plan(
        decode=step.with_drafts(),
        prefill=tuple(step.chunks),
        admit=tuple(step.admitted),
        preempt=tuple(step.preempted),
        num_new_pages=step.num_new_pages,
    )


class _Step:
    """A plan in the making: what is placed, and what is left of the step's pages and tokens."""

    def __init__(self, ranked: list[Running], resources: Resources, limits: Limits) -> None:
        self.running = ranked
        self.limits = limits
        self.page_size = resources.page_size
        self.held = {request.id: request.num_pages for request in ranked}
        self.decodes: list[Running] = []
        self.chunks: list[Chunk] = []
        self.admitted: list[str] = []
        self.preempted: list[str] = []
        self.num_prompt_tokens_left = 0
        self.num_pages_left = resources.free_pages + resources.evictable_pages
        self.num_new_pages = 0

    def place_next_tokens(self, reclaimable: Callable[[str], int]) -> None:
        """A token for each decode, by rank; a page that lacks comes from the worst-ranked requests.

        The best-ranked request gets the page for its next token even where it is a prefill.
        """
        num_kept = len(self.running)
        for index, request in enumerate(self.running):
            assert request.num_left > 0, f"request {request.id} has nothing to compute"
            if index >= num_kept or (index and request.num_left > 1):
                continue
            need = self._pages_lacking(request, 1)
            while need > self.num_pages_left and num_kept - 1 > index:
                num_kept -= 1
                self.preempted.append(self.running[num_kept].id)
                self.num_pages_left += reclaimable(self.running[num_kept].id)
            if need > self.num_pages_left:
                continue  # it keeps what it has and waits for the next page that comes free
            self._grow(request, 1)
            if request.num_left == 1:
                self.decodes.append(request)
        del self.running[num_kept:]

    def place_chunks(self) -> None:
        """The next tokens of started prefills, by rank, in the pages there are. What is left of the budget for prompts
        is so only when all of these are complete, or out of pages: admissions never compete with them."""
        budget = self.limits.max_step_tokens - len(self.decodes)
        budget = min(budget, self.limits.chunk_tokens) if self.decodes else budget
        for request in self.running:
            if request.num_left == 1:
                continue
            count = min(request.num_left, budget, self._room(request))
            if count > 0:
                self._grow(request, count)
                self.chunks.append(Chunk(request.id, request.num_computed, count))
                budget -= count
        self.num_prompt_tokens_left = budget

    def admit(self, waiting: Iterable[Waiting]) -> None:
        """Take in waiting requests, by rank, while the next one's whole prompt fits beside all that runs."""
        num_running, queue = len(self.running), iter(waiting)
        while num_running < self.limits.max_running and self.num_prompt_tokens_left:
            request = next(queue, None)
            if request is None:
                return
            num_cached_pages = request.num_cached // self.page_size
            assert request.num_cached % self.page_size == 0, f"{request.num_cached} cached tokens are not whole pages"
            assert request.num_cached < request.num_known, f"request {request.id} has nothing to compute"
            need = pages_for(request.num_known, self.page_size) - num_cached_pages + request.num_idle_pages
            if need + (self.limits.watermark_pages if num_running else 0) > self.num_pages_left:
                return
            count = min(request.num_known - request.num_cached, self.num_prompt_tokens_left)
            self.admitted.append(request.id)
            self.chunks.append(Chunk(request.id, request.num_cached, count))
            self.num_new_pages += pages_for(request.num_cached + count, self.page_size) - num_cached_pages
            self.num_pages_left -= need
            self.num_prompt_tokens_left -= count
            num_running += 1

    def with_drafts(self) -> tuple[Decode, ...]:
        """The decodes, with drafts as far as tokens and pages are left over, by rank."""
        budget = self.limits.max_step_tokens - len(self.decodes) - sum(chunk.count for chunk in self.chunks)
        placed = []
        for request in self.decodes:
            num_drafts = min(request.num_drafts, self.limits.max_drafts, budget, self._room(request) - 1)
            self._grow(request, 1 + num_drafts)
            budget -= num_drafts
            placed.append(Decode(request.id, 1 + num_drafts))
        return tuple(placed)

    def _pages_lacking(self, request: Running, num_tokens: int) -> int:
        """Pages that ``request`` does not have yet for its next ``num_tokens`` tokens."""
        return max(0, pages_for(request.num_computed + num_tokens, self.page_size) - self.held[request.id])

    def _room(self, request: Running) -> int:
        """Tokens that ``request`` could go on with in its own pages and all that are left."""
        return (self.held[request.id] + self.num_pages_left) * self.page_size - request.num_computed

    def _grow(self, request: Running, num_tokens: int) -> None:
        need = self._pages_lacking(request, num_tokens)
        self.held[request.id] += need
        self.num_pages_left -= need
        self.num_new_pages += need


class WaitingQueue:
    """Ids of waiting requests in order of rank.

    Iterating starts at the best rank and costs nothing for those behind. Adding and removing is a binary search and
    a move of pointers.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, str]] = []
        self._ranks: dict[str, Rank] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, id: str) -> bool:
        return id in self._ranks

    def __iter__(self) -> Iterator[str]:
        return (id for _, id in self._entries)

    def add(self, id: str, rank: Rank) -> None:
        """Queue ``id``. Raises ``ValueError`` for one that is queued already."""
        if id in self._ranks:
            raise ValueError(f"request {id!r} is waiting already")
        self._ranks[id] = rank
        insort(self._entries, (rank, id))

    def remove(self, id: str) -> None:
        """Take ``id`` out (it was admitted or aborted). Raises ``KeyError`` where it is not queued."""
        rank = self._ranks.pop(id)
        del self._entries[bisect_left(self._entries, (rank, id))]
