"""The scheduler: budgets, order, preemption and progress, on hand-worked steps and on whole simulated runs."""

import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import SimulatedEngine

from yunque.engine.scheduler import (
    Chunk,
    Decode,
    Limits,
    Plan,
    Rank,
    Resources,
    Running,
    Waiting,
    WaitingQueue,
    fits,
    plan,
)

LIMITS = Limits(max_running=8, max_step_tokens=64, chunk_tokens=32, max_drafts=3)
PLENTY = Resources(free_pages=1000, evictable_pages=0, page_size=4)


def rank(number: int) -> Rank:
    return Rank(0, number)


def decoding(id: str, number: int, num_known: int = 9, num_pages: int = 2, num_drafts: int = 0) -> Running:
    return Running(id, rank(number), num_known - 1, num_known, num_pages, num_drafts)


def waiting(id: str, number: int, num_known: int, num_cached: int = 0, num_idle_pages: int = 0) -> Waiting:
    return Waiting(id, rank(number), num_known, num_cached, num_idle_pages)


def planned(queue, running, free_pages: int, limits: Limits = LIMITS, gain: int = 2) -> Plan:
    """A plan with pages of 4 tokens, where preempting anybody yields ``gain`` pages."""
    return plan(queue, running, Resources(free_pages, 0, 4), limits, reclaimable=lambda _: gain)


def test_decodes_then_chunks_then_admissions_then_drafts_share_a_step():
    running = [
        Running("prefill", rank(1), 10, 30, 3),
        decoding("a", 2, num_drafts=3),
        decoding("b", 0, num_drafts=3),
    ]
    made = planned([waiting("w", 3, 50, num_cached=8)], running, 1000, Limits(8, 36, 32, max_drafts=3))
    assert made == Plan(
        decode=(Decode("b", 3), Decode("a", 1)),  # 36 - 2 decodes - 32 of prompts leave two drafts
        prefill=(Chunk("prefill", 10, 20), Chunk("w", 8, 12)),
        admit=("w",),
        num_new_pages=1 + 1 + 5 + 3,
    )


def test_without_decodes_a_prompt_gets_the_whole_step():
    made = planned([waiting("w", 0, 100)], [], 1000)
    assert made.prefill == (Chunk("w", 0, 64),)
    assert made.num_new_pages == 16


def test_drafts_go_before_anything_is_preempted():
    running = [decoding("a", 0, 11, 3, num_drafts=3), decoding("b", 1, 13, 3, num_drafts=3)]
    made = planned([], running, 1)
    assert made == Plan(decode=(Decode("a", 2), Decode("b", 4)), num_new_pages=1)  # a's own page holds one more row
    assert made.preempt == ()


def test_the_worst_ranked_are_preempted_until_the_next_tokens_fit():
    running = [decoding(id, number) for number, id in enumerate("abcde")]
    assert planned([], running, 0, gain=2) == Plan(
        decode=(Decode("a", 1), Decode("b", 1), Decode("c", 1)), preempt=("e", "d"), num_new_pages=3
    )
    made = planned([waiting("w", 9, 1)], running, 4, gain=1)
    assert (made.preempt, made.admit, len(made.decode)) == ((), (), 4)  # the last one waits: nobody is behind it


def test_the_best_ranked_request_moves_even_as_a_prefill():
    running = [Running("prefill", rank(0), 8, 30, 2), decoding("a", 1), decoding("b", 2)]
    made = planned([], running, 0, gain=1)
    assert made == Plan(prefill=(Chunk("prefill", 8, 4),), preempt=("b",), num_new_pages=1)


def test_admission_needs_pages_for_the_whole_prompt_and_the_watermark():
    running = [decoding("a", 0, num_pages=3), Running("prefill", rank(1), 4, 40, 1)]
    limits = Limits(8, 64, 40, watermark_pages=2)
    # 9 pages for the rest of the prefill, 2 cached of the 6 of the waiting one, 2 to grow into
    assert planned([waiting("w", 2, 24, 8)], running, 9 + 4 + 2, limits).prefill == (
        Chunk("prefill", 4, 36),
        Chunk("w", 8, 4),
    )
    assert planned([waiting("w", 2, 24, 8)], running, 9 + 4 + 1, limits).admit == ()
    assert planned([waiting("w", 2, 24, 8, 1)], running, 9 + 4 + 2, limits).admit == ()  # a match takes one more
    assert planned([waiting("w", 2, 24, 8)], running, 1000, Limits(8, 64, 36)).admit == ()  # the chunk is full
    assert planned([waiting("w", 0, 24)], [], 6, limits).admit == ("w",)  # alone, no watermark is kept


def test_the_first_that_is_not_admitted_is_the_last_one_read():
    read: list[str] = []

    def queue() -> Iterator[Waiting]:
        for number in range(100_000):
            read.append(str(number))
            yield waiting(str(number), number, 8 if number != 3 else 400)

    assert planned(queue(), [], 20).admit == ("0", "1", "2")
    assert read == ["0", "1", "2", "3"]
    read.clear()
    assert len(planned(queue(), [], 20, Limits(2, 64, 64)).admit) == 2
    assert read == ["0", "1"]


def test_a_request_that_can_never_run_does_not_fit():
    assert [fits(total, num_pages=5, page_size=4) for total in (1, 20, 21)] == [True, True, False]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 8, 8), "max_running 0 must be at least 1"),
        ((8, 7, 8), "max_step_tokens 7 is below max_running 8"),
        ((8, 8, 0), "chunk_tokens 0 must be at least 1"),
        ((8, 8, 8, -1), "max_drafts -1 must be at least 0"),
        ((8, 8, 8, 0, -1), "watermark_pages -1 must be at least 0"),
    ],
)
def test_limits_that_allow_no_progress_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Limits(*numbers)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=40), st.integers(1, 20))
def test_the_queue_is_in_order_of_priority_and_age(arrivals, aging_steps):
    queue, expected = WaitingQueue(), {}
    for step, (priority, _) in enumerate(arrivals):
        expected[str(step)] = Rank.of(priority=priority, step=step, number=step, aging_steps=aging_steps)
        queue.add(str(step), expected[str(step)])
    for step, (_, is_removed) in enumerate(arrivals):
        if is_removed:
            queue.remove(str(step))
            del expected[str(step)]
    assert list(queue) == sorted(expected, key=expected.__getitem__)
    assert len(queue) == len(expected)
    assert all((str(step) in queue) == (str(step) in expected) for step in range(len(arrivals)))
    for first in expected:  # overtaken only within aging_steps for each level of priority
        for later in expected:
            gap = arrivals[int(later)][0] - arrivals[int(first)][0]
            if int(later) > int(first) + max(0, gap) * aging_steps:
                assert expected[first] < expected[later]


def test_the_queue_refuses_a_second_entry_and_a_removal_of_nothing():
    queue = WaitingQueue()
    queue.add("a", rank(0))
    with pytest.raises(ValueError, match="'a' is waiting already"):
        queue.add("a", rank(1))
    with pytest.raises(KeyError):
        queue.remove("b")


def random_engine(draw: random.Random, **limits: int) -> SimulatedEngine:
    max_running = draw.randint(1, 6)
    chosen = {
        "max_running": max_running,
        "max_step_tokens": max_running + draw.randint(0, 20),
        "chunk_tokens": draw.randint(1, 16),
        "max_drafts": draw.randint(0, 3),
        "watermark_pages": draw.randint(0, 3),
    }
    return SimulatedEngine(Limits(**(chosen | limits)), num_pages=draw.randint(10, 30), aging_steps=draw.randint(1, 40))


def random_request(draw: random.Random, engine: SimulatedEngine) -> int:
    """Submit a request on three tokens, so that many share prefixes; returns its length in the end."""
    total = draw.randint(2, min(40, 4 * (engine.allocator.num_pages - 1)))
    prompt = draw.choices([0, 1, 2], weights=[8, 1, 1], k=draw.randint(1, total - 1))
    number = len(engine.requests)
    engine.submit(
        str(number), prompt, total - len(prompt), priority=draw.choice([0, 0, 0, 1, -2]), num_drafts=draw.randint(0, 3)
    )
    return total


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_every_request_finishes_in_bounded_steps_whatever_arrives(seed):
    draw = random.Random(seed)
    engine = random_engine(draw)
    work = 0
    for _ in range(draw.randint(1, 60)):
        for _ in range(draw.choice([0, 0, 1, 2])):
            work += random_request(draw, engine)
        engine.step()
    # The best-ranked of all waits at most for those that run, each of which makes a token a step when it is the best.
    engine.run(len(engine.plans) + (len(engine.requests) + 1) * (work + len(engine.requests)))
    assert all(request.finished is not None for request in engine.requests.values())


def test_preempted_requests_finish_with_the_same_tokens_as_undisturbed_ones():
    num_preempted = num_cached = 0
    for seed in range(25):
        outputs = []
        for num_pages in (11, 400):
            draw = random.Random(seed)
            engine = SimulatedEngine(Limits(6, 24, 12, 2, 1), num_pages=num_pages)
            for _ in range(12):
                prompt = draw.choices([0, 1, 2], weights=[8, 1, 1], k=draw.randint(1, 20))
                engine.submit(str(len(engine.requests)), prompt, draw.randint(1, 22), num_drafts=2)
            engine.run(3000)
            outputs.append({id: request.tokens for id, request in engine.requests.items()})
            num_preempted += sum(request.num_preempted for request in engine.requests.values())
            num_cached += sum(request.num_cached for request in engine.requests.values())
        assert outputs[0] == outputs[1]
    assert num_preempted > 50
    assert num_cached > 1000


def test_a_run_repeats_exactly():
    runs = []
    for _ in range(2):
        draw = random.Random(7)
        engine = random_engine(draw)
        for _ in range(30):
            random_request(draw, engine)
        engine.run(10_000)
        runs.append(engine.plans)
    assert runs[0] == runs[1]


def test_a_long_prompt_delays_decodes_by_its_chunk_and_no_step():
    engine = SimulatedEngine(Limits(4, 64, 8), num_pages=500)
    engine.submit("short", [0, 1], 40)
    engine.step()
    engine.submit("long", [2] * 400, 1)
    engine.run(100)
    short = engine.requests["short"]
    assert short.finished == 39  # a token at every step, from its prompt's step on
    beside = [made for made in engine.plans if made.decode and made.prefill]
    assert len(beside) == 39
    assert {sum(chunk.count for chunk in made.prefill) for made in beside} == {8}


def steps_until_admitted(aging_steps: int) -> int:
    """How long priority 0 waits while requests of priority 2 arrive faster than they can run."""
    engine = SimulatedEngine(Limits(2, 16, 8), num_pages=20, aging_steps=aging_steps)
    for step in range(400):
        if step == 10:
            engine.submit("old", [1] * 8, 4)
        if step % 2 == 0:
            engine.submit(f"new{step}", [0] * 8, 8, priority=2)
        engine.step()
        if engine.requests.get("old") and engine.requests["old"].admitted:
            break
    return len(engine.plans) - 10


def test_a_waiting_request_ages_past_higher_priorities():
    waits = [steps_until_admitted(aging_steps) for aging_steps in (0, 5, 10, 20, 1000)]
    assert waits == sorted(waits)
    # After 2 levels of aging_steps nobody new overtakes; those who came until then and still wait go before.
    assert all(wait <= 3 * 2 * aging + 20 for wait, aging in zip(waits[:4], (0, 5, 10, 20), strict=True))
    assert waits[4] == 390


def test_a_big_request_is_not_overtaken_by_small_ones():
    engine = SimulatedEngine(Limits(8, 64, 32), num_pages=20, aging_steps=10)
    for step in range(100):
        if step == 5:
            engine.submit("big", [1] * 70, 4)
        engine.submit(f"small{step}", [0] * 6, 10)
        engine.step()
    big = engine.requests["big"]
    assert big.finished is not None
    assert big.finished <= 5 + 60
    later = [r for r in engine.requests.values() if r.rank > big.rank and r.admitted]
    assert later
    assert min(request.admitted[0] for request in later) >= big.admitted[0]


def test_a_request_of_higher_priority_is_admitted_first_and_preempted_last():
    engine = SimulatedEngine(Limits(3, 32, 32), num_pages=13, aging_steps=1000)
    for id, priority in [("low", -1), ("first", 0), ("second", 0), ("high", 1)]:
        engine.submit(id, [len(id)] * 8, 24, priority=priority)
    assert engine.step().admit == ("high", "first", "second")
    engine.run(1000)
    assert engine.requests["high"].num_preempted == 0
    assert engine.requests["second"].num_preempted == 1
    assert sorted(engine.requests, key=lambda id: engine.requests[id].finished) == ["high", "first", "second", "low"]


def test_the_cost_of_a_plan_does_not_grow_with_the_queue():
    queue, running = WaitingQueue(), [decoding(str(number), number, num_pages=3) for number in range(64)]
    for number in range(100_000):
        queue.add(f"w{number}", rank(100 + number))
    limits = Limits(64, 256, 128)
    started = time.process_time()
    for _ in range(50):
        made = plan((waiting(id, 0, 8) for id in queue), running, PLENTY, limits, reclaimable=lambda _: 0)
    assert len(made.decode) == 64
    assert (time.process_time() - started) / 50 < 0.01
