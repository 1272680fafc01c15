"""The health machine: ejection after bad signs in a row, return after good ones, waits that grow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.serve.router.health import EngineHealth, HeartbeatSettings, Sign, State

SETTINGS = HeartbeatSettings(interval_s=2, eject_after=3, return_after=2, backoff_max_s=30)


def health(*signs: Sign) -> EngineHealth:
    made = EngineHealth(SETTINGS, now_s=0)
    for sign in signs:
        made.observe(sign, now_s=0)
    return made


def test_an_engine_is_used_from_its_first_good_sign_and_a_loading_one_is_waited_for():
    assert health().state is State.STARTING
    assert health(*[Sign.SILENT] * 50).state is State.STARTING
    assert health(Sign.SILENT, Sign.OK).is_usable


def test_three_bad_signs_in_a_row_eject_and_two_good_ones_bring_back():
    made = health(Sign.OK, Sign.SILENT, Sign.UNWELL, Sign.OK, Sign.SILENT, Sign.UNWELL)
    assert made.is_usable
    assert made.observe(Sign.SILENT, now_s=0) is True
    assert made.state is State.EJECTED
    made.observe(Sign.OK, now_s=1)
    made.observe(Sign.SILENT, now_s=2)
    made.observe(Sign.OK, now_s=3)
    assert made.state is State.EJECTED
    made.observe(Sign.OK, now_s=4)
    assert made.is_usable


def test_a_paused_engine_stays_in_use():
    assert health(Sign.OK, *[Sign.PAUSED] * 20).is_usable


def test_the_wait_doubles_for_a_dead_engine_up_to_its_limit_and_falls_back_at_the_first_good_sign():
    made, waits = health(Sign.OK), []
    for _ in range(9):
        made.observe(Sign.SILENT, now_s=100)
        waits.append(made.next_probe_s - 100)
    assert waits == [2, 2, 2, 4, 8, 16, 30, 30, 30]
    made.observe(Sign.OK, now_s=100)
    assert made.next_probe_s == 102


def test_failed_requests_count_and_bring_the_next_heartbeat_forward():
    made = health(Sign.OK)
    assert made.next_probe_s == 2
    assert made.blame(Sign.SILENT, now_s=0.5, reason="cut") is False
    assert made.next_probe_s == 0.5
    made.blame(Sign.SILENT, now_s=0.5, reason="cut")
    assert made.blame(Sign.SILENT, now_s=0.5, reason="cut") is True
    assert (made.state, made.reason) == (State.EJECTED, "cut")
    assert made.blame(Sign.SILENT, now_s=0.6, reason="late") is False


@given(st.lists(st.sampled_from(list(Sign)), max_size=60))
def test_state_changes_only_after_the_stated_number_of_signs(signs):
    made, run, last = EngineHealth(SETTINGS, now_s=0), 0, None
    for sign in signs:
        before, is_good = made.state, sign in (Sign.OK, Sign.PAUSED)
        run = run + 1 if is_good == last else 1
        last = is_good
        made.observe(sign, now_s=0)
        if before is State.USABLE:
            assert made.is_usable == (is_good or run < 3)
        elif before is State.EJECTED:
            assert made.is_usable == (is_good and run >= 2)
        else:
            assert made.is_usable == is_good


@pytest.mark.parametrize(
    ("option", "value"), [("interval_s", 0), ("timeout_s", -1), ("eject_after", 0), ("return_after", 0)]
)
def test_settings_name_the_value_that_cannot_be(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        HeartbeatSettings(**{option: value})
