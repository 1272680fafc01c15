"""An engine without a model: the real scheduler, allocator and prefix tree, and rows that remember what they hold."""

import random
from dataclasses import dataclass, field

from yunque.engine.pages import PageAllocator, pages_for
from yunque.engine.prefix_tree import PrefixTree
from yunque.engine.scheduler import Limits, Plan, Rank, Resources, Running, Waiting, WaitingQueue, fits, plan


@dataclass
class SimulatedRequest:
    """A request of ``num_new`` tokens to make; every token made depends on all tokens before it."""

    id: str
    rank: Rank
    tokens: list[int]
    max_total: int
    submitted: int
    num_drafts: int = 0
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    finished: int | None = None
    num_preempted: int = 0
    num_cached: int = 0

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_computed


class SimulatedEngine:
    """Each ``step`` plans, checks the plan against what it may do, and carries it out.

    A row's content is a digest of the tokens up to it. A finished request has read every row it relied on, so a page
    that was lost, overwritten or matched wrongly shows.
    """

    def __init__(self, limits: Limits, *, num_pages: int, page_size: int = 4, aging_steps: int = 10) -> None:
        self.limits = limits
        self.page_size = page_size
        self.aging_steps = aging_steps
        self.allocator = PageAllocator(num_pages + 1, page_size, reserved=1)
        self.tree = PrefixTree(page_size, self.allocator)
        self.queue = WaitingQueue()
        self.requests: dict[str, SimulatedRequest] = {}
        self.running: dict[str, SimulatedRequest] = {}
        self.rows: dict[tuple[int, int], int] = {}
        self.plans: list[Plan] = []
        self.num_allocated = 0  # pages, in the last step
        self._shuffle = random.Random(0)

    @property
    def is_done(self) -> bool:
        return not self.queue and not self.running

    def submit(self, id: str, prompt: list[int], num_new: int, *, priority: int = 0, num_drafts: int = 0) -> None:
        total, step = len(prompt) + num_new, len(self.plans)
        assert fits(total, num_pages=self.allocator.num_pages - 1, page_size=self.page_size)
        rank = Rank.of(priority=priority, step=step, number=len(self.requests), aging_steps=self.aging_steps)
        self.requests[id] = SimulatedRequest(id, rank, list(prompt), total, step, num_drafts)
        self.queue.add(id, rank)

    def step(self) -> Plan:
        records = [
            Running(r.id, r.rank, r.num_computed, len(r.tokens), len(r.pages), self._num_drafts(r))
            for r in self.running.values()
        ]
        resources = Resources(self.allocator.num_free, self.tree.num_evictable_pages, self.page_size)
        made = plan(self._waiting(), records, resources, self.limits, reclaimable=self._reclaimable)
        self._shuffle.shuffle(records)
        again = plan(self._waiting(), records, resources, self.limits, reclaimable=self._reclaimable)
        assert again == made, "the plan depends on the order of the running requests"
        self._check(made, resources)
        self._carry_out(made)
        self.plans.append(made)
        return made

    def run(self, max_steps: int) -> None:
        """Step until nothing is left, in at most ``max_steps`` steps from the start."""
        while not self.is_done:
            assert len(self.plans) < max_steps, f"{len(self.running)} run, {len(self.queue)} wait"
            self.step()
        self.tree.evict(self.allocator.num_pages)
        assert self.allocator.num_used == 0

    def _num_drafts(self, request: SimulatedRequest) -> int:
        return min(request.num_drafts, request.max_total - len(request.tokens) - 1) if request.num_left == 1 else 0

    def _waiting(self):
        for id in self.queue:
            request = self.requests[id]
            probe = self.tree.probe(request.tokens, limit=len(request.tokens) - 1)
            yield Waiting(id, request.rank, len(request.tokens), probe.num_tokens, probe.num_idle_pages)

    def _reclaimable(self, id: str) -> int:
        return self.tree.num_reclaimable_pages(self.running[id].pages)

    def _check(self, made: Plan, resources: Resources) -> None:
        limits, running = self.limits, self.running
        by_rank = sorted(running, key=lambda id: running[id].rank)
        decoding = [id for id in by_rank if running[id].num_left == 1]
        computed = [*[decode.id for decode in made.decode], *[chunk.id for chunk in made.prefill]]
        assert len(set(computed)) == len(computed)
        assert not set(made.preempt) & {*computed, *by_rank[:1]}
        assert list(made.preempt) == by_rank[::-1][: len(made.preempt)], "others than the worst-ranked were preempted"
        assert list(made.admit) == list(self.queue)[: len(made.admit)], "a waiting request was overtaken"
        assert not (made.admit and made.preempt)
        assert made.num_tokens <= limits.max_step_tokens
        assert len(running) + len(made.admit) - len(made.preempt) <= limits.max_running
        if made.decode:
            assert sum(chunk.count for chunk in made.prefill) <= limits.chunk_tokens
        for decode in made.decode:
            request = running[decode.id]
            assert request.num_left == 1
            assert 1 <= decode.num_tokens <= 1 + min(limits.max_drafts, self._num_drafts(request))
        need = {
            id: max(0, pages_for(running[id].num_computed + 1, self.page_size) - len(running[id].pages))
            for id in {*decoding, *by_rank[:1]}
        }
        total = resources.free_pages + resources.evictable_pages
        if sum(need.values()) <= total:
            assert not made.preempt, "preempted although the next tokens had their pages"
            assert [decode.id for decode in made.decode] == decoding, "a decode was held up"
        if by_rank and need[by_rank[0]] <= total:
            assert by_rank[0] in computed, "the best-ranked request stood still"

    def _carry_out(self, made: Plan) -> None:
        step = len(self.plans)
        for id in made.preempt:
            request = self.running.pop(id)
            self._let_go(request)
            request.num_computed, request.num_preempted = 0, request.num_preempted + 1
            self.queue.add(id, request.rank)
        for id in made.admit:
            request = self.requests[id]
            match = self.tree.match(request.tokens, limit=len(request.tokens) - 1)
            request.pages, request.num_computed = list(match.pages), match.num_tokens
            request.num_cached += match.num_tokens
            request.admitted.append(step)
            self.queue.remove(id)
            self.running[id] = request
        self.tree.evict(max(0, made.num_new_pages - self.allocator.num_free))
        assert self.allocator.num_free >= made.num_new_pages, "the pages of the plan do not suffice"
        self.num_allocated = 0
        for chunk in made.prefill:
            request = self.running[chunk.id]
            assert chunk.start == request.num_computed
            self._compute(request, chunk.count, num_accepted=0)
        for decode in made.decode:
            self._compute(self.running[decode.id], 1, num_accepted=step % decode.num_tokens, width=decode.num_tokens)
        assert self.num_allocated == made.num_new_pages
        for request in [r for r in self.running.values() if len(r.tokens) >= r.max_total]:
            assert len(request.tokens) == request.max_total
            self._verify(request)
            self._let_go(self.running.pop(request.id))
            request.finished = step

    def _compute(self, request: SimulatedRequest, count: int, *, num_accepted: int, width: int = 0) -> None:
        """Write rows, then sample: one token when all known ones are computed, and the accepted drafts before it."""
        need = pages_for(request.num_computed + max(count, width), self.page_size) - len(request.pages)
        if need > 0:
            self.num_allocated += need
            request.pages += self.allocator.allocate(need, after=request.pages[-1] if request.pages else None)
        self._write(request, count)
        if request.num_left:
            return
        for _ in range(num_accepted):
            request.tokens.append(self._sample(request))
            self._write(request, 1)
        request.tokens.append(self._sample(request))
        if request.num_computed % 3 == 0:
            tokens = request.tokens[: request.num_computed]
            insertion = self.tree.insert(tokens, request.pages)
            request.pages = self.tree.adopt(request.pages, insertion) if len(tokens) % 2 else request.pages

    def _write(self, request: SimulatedRequest, count: int) -> None:
        for position in range(request.num_computed, request.num_computed + count):
            page, slot = divmod(position, self.page_size)
            assert self.allocator.references(request.pages[page]) == 1, "a shared page is written"
            before = self._row(request, position - 1) if position else 0
            self.rows[request.pages[page], slot] = hash((before, request.tokens[position]))
        request.num_computed += count

    def _row(self, request: SimulatedRequest, position: int) -> int:
        page, slot = divmod(position, self.page_size)
        return self.rows[request.pages[page], slot]

    def _sample(self, request: SimulatedRequest) -> int:
        return self._row(request, request.num_computed - 1) % 3

    def _verify(self, request: SimulatedRequest) -> None:
        digest = 0
        for position in range(request.num_computed):
            digest = hash((digest, request.tokens[position]))
            assert self._row(request, position) == digest, f"{request.id} read a wrong row at {position}"

    def _let_go(self, request: SimulatedRequest) -> None:
        self.tree.insert(request.tokens[: request.num_computed], request.pages)
        self.allocator.release(request.pages)
        request.pages = []
