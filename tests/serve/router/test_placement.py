"""Placement: loads stay bounded, sessions stay where they are, prefixes decide where nothing else does."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunque.serve.router.placement import Ask, Placement, PlacementSettings, Why, load_bound

ENGINES = ["http://a", "http://b", "http://c", "http://d"]


def placement(**options: object) -> Placement:
    made = Placement(PlacementSettings(**options))
    for engine in ENGINES:
        made.add(engine)
    return made


def idle() -> dict[str, int]:
    return dict.fromkeys(ENGINES, 0)


@settings(max_examples=200, deadline=None)
@given(
    factor=st.floats(1.0, 3.0),
    slots=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=120),
)
def test_no_engine_ever_holds_more_than_its_bound_whatever_the_sessions(factor, slots, steps):
    made, loads = placement(load_factor=factor, free_slots=slots), idle()
    running: list[tuple[Ask, str]] = []
    for session, is_end in steps:
        if is_end and running:
            ask, engine = running.pop(0)
            made.release(ask)
            loads[engine] -= 1
            continue
        ask = Ask(session=f"s{session}" if session else None)
        bound = load_bound(loads, made.settings)
        engine = made.place(ask, loads, now_s=0).engine
        loads[engine] += 1
        running.append((ask, engine))
        assert loads[engine] <= bound
        assert bound <= max(slots, factor * sum(loads.values()) / 4 + 1)


@given(st.lists(st.integers(0, 30), min_size=4, max_size=4), st.floats(1.0, 2.0))
def test_some_engine_is_always_below_the_bound(counts, factor):
    loads = dict(zip(ENGINES, counts, strict=True))
    assert min(counts) < load_bound(loads, PlacementSettings(load_factor=factor, free_slots=1))


def test_the_bound_by_hand():
    paper = PlacementSettings(load_factor=1.25, free_slots=1)
    assert load_bound({"a": 3, "b": 4}, paper) == 5  # 1.25 x 8 / 2
    assert load_bound({"a": 3, "b": 4, "c": 0}, paper) == 4  # 1.25 x 8 / 3 = 3.33
    assert load_bound({"a": 0}, PlacementSettings()) == 8


def test_a_hot_session_spreads_over_all_engines_and_leaves_room_for_others():
    made, loads = placement(), idle()
    for _ in range(400):
        loads[made.place(Ask("hot"), loads, now_s=0).engine] += 1
    assert max(loads.values()) <= 126  # 1.25 x 400 / 4 + 1
    assert min(loads.values()) > 0
    placed = [made.place(Ask(f"quiet-{n}"), loads, now_s=0) for n in range(40)]
    assert all(loads[place.engine] <= 126 for place in placed)


def test_new_sessions_are_spread_within_the_load_factor_though_idle():
    made, loads = placement(load_factor=1.25), idle()
    for number in range(2000):
        ask = Ask(f"session-{number}")
        made.place(ask, loads, now_s=0)
        made.release(ask)
    assert max(made.sessions_of.values()) <= 626
    assert sum(made.sessions_of.values()) == 2000


def test_a_session_keeps_its_engine_while_others_come_and_go():
    made, loads = placement(), idle()
    first = {n: made.place(Ask(f"s{n}"), loads, now_s=0).engine for n in range(200)}
    for n in range(200):
        made.release(Ask(f"s{n}"))
    made.add("http://e")
    loads["http://e"] = 0
    placed = {n: made.place(Ask(f"s{n}"), loads, now_s=1) for n in range(200)}
    assert {n: place.engine for n, place in placed.items()} == first
    assert {place.why for place in placed.values()} == {Why.STICKY}


def test_only_sessions_of_a_lost_engine_move_and_they_stay_where_they_went():
    made, loads = placement(), idle()

    def turn(loads: dict[str, int]) -> dict[int, str]:
        engines = {}
        for n in range(200):
            engines[n] = made.place(Ask(f"s{n}"), loads, now_s=0).engine
            made.release(Ask(f"s{n}"))
        return engines

    before = turn(loads)
    without = turn({engine: 0 for engine in ENGINES if engine != "http://a"})
    moved = [n for n in range(200) if before[n] != without[n]]
    assert {before[n] for n in moved} == {"http://a"}
    assert len(moved) == Counter(before.values())["http://a"]
    assert len({without[n] for n in moved}) == 3
    assert turn(loads) == without  # a returns: nobody runs back to its empty cache


def test_a_lone_request_takes_its_session_along_and_a_crowd_does_not():
    made = placement(free_slots=1)
    home = made.place(Ask("s"), idle(), now_s=0).engine
    full = idle() | {home: 5}
    spilled = made.place(Ask("s"), full, now_s=0)  # the first one is still running
    assert (spilled.why, made.engine_of("s")) == (Why.SPILLED, home)
    made.release(Ask("s"))
    made.release(Ask("s"))
    moved = made.place(Ask("s"), full, now_s=0)
    assert made.engine_of("s") == moved.engine != home


def test_a_spilled_session_goes_to_the_engine_that_knows_most_of_its_prompt():
    made, blocks = placement(free_slots=1), tuple(bytes([n]) for n in range(6))
    home = made.place(Ask("s", blocks), idle(), now_s=0).engine
    other = next(engine for engine in reversed(ENGINES) if engine != home)
    only_other = {other: 0}
    made.place(Ask(None, blocks[:4]), only_other, now_s=0)
    assert made.place(Ask("s", blocks), idle() | {home: 9}, now_s=0).engine == other


def test_without_a_session_the_longest_known_prefix_wins_then_the_lightest_load():
    made, blocks = placement(), tuple(bytes([n]) for n in range(8))
    assert made.place(Ask(None, blocks[:6]), {"http://b": 0}, now_s=0).why is Why.LEAST_LOADED
    made.place(Ask(None, blocks[:3]), {"http://c": 0}, now_s=0)
    placed = made.place(Ask(None, blocks), idle() | {"http://b": 5}, now_s=0)
    assert (placed.engine, placed.why) == ("http://b", Why.PREFIX)
    shared = made.place(Ask(None, (*blocks[:3], b"other")), idle() | {"http://b": 5}, now_s=0)
    assert shared.engine == "http://c"  # both know three blocks
    lone = made.place(Ask(None, (b"new",)), {"http://a": 2, "http://b": 1, "http://c": 2, "http://d": 3}, now_s=0)
    assert (lone.engine, lone.why) == ("http://b", Why.LEAST_LOADED)


def test_a_prefix_does_not_pull_requests_over_the_bound():
    made, loads = placement(free_slots=4), idle()
    for _ in range(40):
        loads[made.place(Ask(None, (b"system prompt",)), loads, now_s=0).engine] += 1
    assert max(loads.values()) <= 13  # 1.25 x 40 / 4 + 1
    assert min(loads.values()) >= 4


def test_an_emptied_cache_is_forgotten():
    made, blocks = placement(), (b"x", b"y")
    made.place(Ask(None, blocks), {"http://b": 0}, now_s=0)
    made.forget_cache("http://b")
    assert made.place(Ask(None, blocks), idle(), now_s=0).why is Why.LEAST_LOADED


def test_idle_sessions_are_forgotten_running_ones_are_not_and_memory_is_bounded():
    made = placement(session_idle_s=10, max_sessions=50, max_blocks=100)
    made.place(Ask("running"), idle(), now_s=0)
    made.place(Ask("idle"), idle(), now_s=0)
    made.release(Ask("idle"))
    made.place(Ask("other"), idle(), now_s=20)
    assert made.engine_of("idle") is None
    assert made.engine_of("running") is not None
    for n in range(500):
        made.place(Ask(f"s{n}", (bytes([n % 256, n // 256]),)), idle(), now_s=20)
    assert sum(made.sessions_of.values()) == 50
    assert len(made._blocks) == 100


def test_a_removed_engine_is_never_chosen_and_leaves_no_trace():
    made = placement()
    for n in range(100):
        made.place(Ask(f"s{n}", (bytes([n]),)), idle(), now_s=0)
    made.remove("http://a")
    assert "http://a" not in made.sessions_of
    rest = {engine: 0 for engine in ENGINES[1:]}
    assert {made.place(Ask(f"s{n}"), rest, now_s=0).engine for n in range(100)} == set(rest)


@pytest.mark.parametrize(
    ("option", "value"),
    [("load_factor", 0.9), ("load_factor", float("nan")), ("free_slots", 0), ("session_idle_s", 0), ("max_blocks", 0)],
)
def test_settings_name_the_value_that_cannot_be(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        PlacementSettings(**{option: value})
