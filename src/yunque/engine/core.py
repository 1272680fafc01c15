"""The engine's step: schedule, run, sample, publish. One thread; a caller drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch

from yunque.engine.intake import Intake
from yunque.engine.page_store import PageStore
from yunque.engine.pages import PageAllocator, pages_for
from yunque.engine.prefix_tree import Insertion, PrefixTree
from yunque.engine.runner import Pass, Runner
from yunque.engine.sampler import Sampler
from yunque.engine.scheduler import Chunk, Decode, Limits, Plan, Rank, Resources, Running, Waiting, WaitingQueue
from yunque.engine.scheduler import plan as make_plan
from yunque.engine.sequence import NewToken, Sequence
from yunque.engine.settings import EngineSettings
from yunque.engine.speculation import Drafter, Verifier
from yunque.model.transformer import Transformer
from yunque.protocol.errors import Overloaded, RequestError
from yunque.protocol.generation import EngineStats, Finish, TokenDelta
from yunque.text import Tokenizer

Sink = Callable[[TokenDelta], None]


@dataclass
class _Totals:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


@dataclass
class _Live:
    sequence: Sequence
    sink: Sink


class EngineCore:
    """Requests in, token deltas out. Nothing here blocks or knows of threads, clocks or HTTP.

    ``intake.prepare`` and ``enqueue`` take a request; ``step`` moves everything on and hands every sequence's new
    tokens to its sink.
    """

    def __init__(
        self, model: Transformer, settings: EngineSettings, *, num_pages: int, tokenizer: Tokenizer | None = None
    ) -> None:
        self.model = model
        self.settings = settings
        self.tokenizer = tokenizer
        self.version = 0
        weight = model.lm_head.weight
        config, drafts = model.config, settings.num_drafts
        self.store = PageStore(
            config,
            num_pages=num_pages,
            page_size=settings.page_size,
            dtype=weight.dtype,
            device=weight.device,
            with_mtp=drafts > 0,
        )
        self.allocator = PageAllocator(num_pages, settings.page_size)
        self.tree = PrefixTree(settings.page_size, self.allocator)
        self.sampler = Sampler()
        self.runner = Runner(model, self.store)
        self._verifier = Verifier(self.sampler, settings.acceptance)
        self._drafter = (
            Drafter(self.runner, self.sampler, num_drafts=drafts, acceptance=settings.acceptance) if drafts else None
        )
        self.limits = Limits(
            max_running=settings.max_running,
            max_step_tokens=settings.max_step_tokens,
            chunk_tokens=settings.chunk_tokens,
            max_drafts=drafts,
            watermark_pages=min(settings.watermark_pages, num_pages // 8),
        )
        self._live: dict[str, _Live] = {}
        self._queue = WaitingQueue()
        self._running: dict[str, Sequence] = {}
        self._totals = _Totals()
        self._numbers = count(1)
        self.intake = Intake(config, settings, num_pages=num_pages, tokenizer=tokenizer)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._live)

    @property
    def live_ids(self) -> tuple[str, ...]:
        """Requests that are not finished."""
        return tuple(self._live)

    def stats(self) -> EngineStats:
        """Numbers of the moment and totals."""
        totals = self._totals
        return EngineStats(
            running=len(self._running),
            waiting=len(self._queue),
            pages_total=self.allocator.num_pages,
            pages_free=self.allocator.num_free,
            pages_cached=self.tree.num_cached_pages,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            drafted_tokens=totals.drafted_tokens,
            accepted_tokens=totals.accepted_tokens,
            preemptions=totals.preemptions,
            steps=totals.steps,
        )

    def enqueue(self, sequence: Sequence, sink: Sink) -> None:
        """Queue a prepared request. Raises ``RequestError`` when its id is in use, ``Overloaded`` when too many
        are in progress."""
        id, number = sequence.id, next(self._numbers)
        if id in self._live:
            raise RequestError(f"request id {id!r} is in use", param="id")
        if len(self._live) >= self.settings.max_live:
            raise Overloaded(f"{len(self._live)} requests are in progress already", retry_after_s=1.0)
        sequence.rank = Rank.of(
            priority=sequence.request.priority,
            step=self._totals.steps,
            number=number,
            aging_steps=self.settings.aging_steps,
        )
        self._live[id] = _Live(sequence, sink)
        if sequence.finish is None:
            self._queue.add(id, sequence.rank)
        else:  # resumed where it was at its end
            self._retire(sequence)

    def abort(self, id: str, finish: Finish = Finish.ABORTED) -> bool:
        """End a request now and free its pages; False if it is not live."""
        live = self._live.get(id)
        if live is None:
            return False
        live.sequence.finish = finish
        self._retire(live.sequence)
        return True

    def drop_cache(self) -> None:
        """Forget every computed row: the weights have changed. Requests in flight compute theirs again."""
        self.tree.clear()
        for sequence in self._running.values():
            sequence.restart()
            # Shared pages may be found by nobody, but two holders must not write the same rows.
            self.allocator.release(sequence.pages.tolist())
            sequence.forget_pages()
        for sequence in list(self._running.values()):
            del self._running[sequence.id]
            self._queue.add(sequence.id, sequence.rank)

    @torch.inference_mode()
    def step(self) -> None:
        """One step for everybody. After an exception the engine's rows cannot be trusted."""
        plan = self._plan()
        self._totals.steps += 1
        self._take_in(plan)
        if plan.decode:
            self._decode(plan.decode)
        for chunk in plan.prefill:
            self._prefill(chunk)

    def _plan(self) -> Plan:
        running = [
            Running(
                seq.id,
                seq.rank,
                seq.num_computed,
                len(seq.tokens),
                seq.num_pages,
                min(len(seq.drafts), max(0, seq.max_total - len(seq.tokens) - 1)),
            )
            for seq in self._running.values()
        ]
        resources = Resources(self.allocator.num_free, self.tree.num_evictable_pages, self.settings.page_size)
        return make_plan(self._waiting(), running, resources, self.limits, reclaimable=self._reclaimable)

    def _waiting(self) -> Iterator[Waiting]:
        for id in self._queue:
            seq = self._live[id].sequence
            probe = self.tree.probe(seq.tokens, limit=self._cacheable(seq), namespace=seq.request.cache_salt)
            yield Waiting(id, seq.rank, len(seq.tokens), probe.num_tokens, probe.num_idle_pages)

    def _cacheable(self, seq: Sequence) -> int:
        """Tokens that may come from the tree: all but the last; none where a prompt's log-probabilities are due."""
        wants_rows = seq.request.prompt_logprobs and len(seq.prompt_logprobs) < seq.num_prompt - 1
        return 0 if wants_rows else len(seq.tokens) - 1

    def _reclaimable(self, id: str) -> int:
        return self.tree.num_reclaimable_pages(self._running[id].pages.tolist())

    def _take_in(self, plan: Plan) -> None:
        """Carry out what the plan says about pages."""
        for id in plan.preempt:
            seq = self._running.pop(id)
            self._remember(seq)
            seq.restart()
            self._queue.add(id, seq.rank)
            self._totals.preemptions += 1
        for id in plan.admit:
            seq = self._live[id].sequence
            match = self.tree.match(seq.tokens, limit=self._cacheable(seq), namespace=seq.request.cache_salt)
            self._queue.remove(id)
            self._running[id] = seq
            seq.add_pages(match.pages)
            seq.num_computed = match.num_tokens
            if seq.cached_tokens is None:
                seq.cached_tokens = match.num_tokens
                self._totals.prompt_tokens += len(seq.request.tokens)
                self._totals.cached_tokens += match.num_tokens
        lacking = plan.num_new_pages - self.allocator.num_free
        if lacking > 0:
            self.tree.evict(lacking)
        for work in (*plan.decode, *plan.prefill):
            seq = self._running[work.id]
            count = work.num_tokens if isinstance(work, Decode) else work.count
            self._grow(seq, seq.num_computed + count)

    def _grow(self, seq: Sequence, num_positions: int) -> None:
        lacking = pages_for(num_positions, self.settings.page_size) - seq.num_pages
        if lacking > 0:
            after = int(seq.pages[-1]) if seq.num_pages else None
            later = pages_for(seq.max_total, self.settings.page_size) - seq.num_pages - lacking
            seq.add_pages(self.allocator.allocate(lacking, after=after, room=later))

    def _decode(self, work: tuple[Decode, ...]) -> None:
        sequences = [self._running[decode.id] for decode in work]
        pairs = [(seq, d.num_tokens - 1) for seq, d in zip(sequences, work, strict=True)]
        pairs = [(seq, num_drafts) for seq, num_drafts in pairs if self._is_constrained(seq, num_drafts)]
        if not pairs:
            return
        sequences, num_drafts = [seq for seq, _ in pairs], [count for _, count in pairs]
        done, logits_TV = self.runner.decode(sequences, num_drafts)
        starts = [seq.num_computed for seq in sequences]
        for seq, gained in zip(sequences, self._verifier.gain(sequences, num_drafts, logits_TV), strict=True):
            self._extend(seq, gained)
            seq.num_computed = len(seq.tokens) - 1
        self._draft(sequences, done, starts)
        for seq in sequences:
            self._publish(seq)

    def _prefill(self, chunk: Chunk) -> None:
        seq = self._running[chunk.id]
        done = self.runner.prefill(seq, chunk.start, chunk.count)
        if self._cacheable(seq) == 0 and seq.request.prompt_logprobs:
            seq.prompt_logprobs += self.runner.prompt_logprobs(seq, chunk.start, done)
        seq.num_computed = chunk.start + chunk.count
        if seq.num_computed == len(seq.tokens):
            self._share(seq)
            if seq.max_total == len(seq.tokens):
                seq.finish = Finish.LENGTH
            elif self._is_constrained(seq, 0):
                (gained,) = self._verifier.gain([seq], [0], self.runner.last_logits(done))
                self._extend(seq, gained)
        if seq.id in self._running:
            self._draft([seq], done, [chunk.start])
            self._publish(seq)

    def _draft(self, sequences: list[Sequence], done: Pass, starts: list[int]) -> None:
        for seq in sequences:
            seq.drafts, seq.draft_laws = (), None
        if self._drafter is None:
            return
        for seq in sequences:
            wanted = len(seq.tokens) - 2 + self.settings.num_drafts
            lacking = pages_for(min(wanted, seq.max_total), self.settings.page_size) - seq.num_pages
            if 0 < lacking <= self.allocator.num_free - self.limits.watermark_pages:
                self._grow(seq, min(wanted, seq.max_total))
        self._drafter.propose(sequences, done, starts)

    def _is_constrained(self, seq: Sequence, num_drafts: int) -> bool:
        """Note what the constraint, if any, leaves; False if the sequence is at its end by it."""
        if seq.matcher is None:
            return True
        if seq.matcher.is_finished:
            seq.finish = Finish.STOP
        else:
            try:
                seq.masks = seq.matcher.masks(seq.drafts[:num_drafts])
            except RequestError as error:
                seq.finish, seq.error = Finish.ERROR, str(error)
        if seq.finish is not None:
            self._publish(seq)
        return seq.finish is None

    def _extend(self, seq: Sequence, gained: list[NewToken]) -> None:
        for new in gained:
            if new.logprob != new.logprob:  # NaN: the weights or the cache are broken, for this request at least
                seq.finish, seq.error = Finish.ERROR, "the model's logits are not numbers"
                return
            self._totals.generated_tokens += 1
            if not seq.add(new, self.version):
                return

    def _share(self, seq: Sequence) -> None:
        """Let others find the pages of a computed prompt at once."""
        insertion = self._insert(seq)
        seq.replace_pages(self.tree.adopt(seq.pages.tolist(), insertion))

    def _insert(self, seq: Sequence) -> Insertion:
        tokens, salt = seq.tokens[: seq.num_computed], seq.request.cache_salt
        return self.tree.insert(tokens, seq.pages.tolist(), namespace=salt)

    def _publish(self, seq: Sequence) -> None:
        live = self._live.get(seq.id)
        if live is None:
            return
        if seq.finish is not None:
            self._retire(seq)
        elif (delta := seq.take_delta()) is not None:
            live.sink(delta)

    def _retire(self, seq: Sequence) -> None:
        """The end of a request: its rows go to the tree, its last delta to its sink."""
        live = self._live.pop(seq.id)
        if seq.id in self._queue:
            self._queue.remove(seq.id)
        elif self._running.pop(seq.id, None) is not None:
            self._remember(seq)
        self._totals.drafted_tokens += seq.drafted
        self._totals.accepted_tokens += seq.accepted
        delta = seq.take_delta()
        assert delta is not None
        live.sink(delta)

    def _remember(self, seq: Sequence) -> None:
        """Give the sequence's pages back; what is computed stays in the tree as long as there is room."""
        pages = seq.pages.tolist()
        if seq.finish is not Finish.ERROR:
            self._insert(seq)
        self.allocator.release(pages)
        seq.forget_pages()
