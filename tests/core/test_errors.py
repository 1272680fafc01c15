"""Errors: every one is catchable as YunqueError, and a wrong name is answered with the right one."""

import pytest

from yunque.core import errors
from yunque.core.errors import nearest, unknown


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.DataError, errors.CheckpointError, errors.TemplateError])
def test_every_error_is_caught_as_yunque_error_and_as_value_error(kind):
    with pytest.raises(errors.YunqueError):
        raise kind("x")
    with pytest.raises(ValueError, match="x"):
        raise kind("x")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lr_peek", "lr_peak"), ("LR_PEAK", "lr_peak"), ("step", "steps"), ("zzz", None), ("", None)],
)
def test_nearest_name_is_the_one_meant_or_none(name, expected):
    assert nearest(name, ["steps", "lr_peak", "warmup_tokens"]) == expected


def test_unknown_names_the_value_the_place_the_guess_and_every_choice():
    message = unknown("key", "lr_peek", ["steps", "lr_peak"], where="[train]")
    assert message == "unknown key 'lr_peek' in [train]; did you mean 'lr_peak'? valid: lr_peak, steps"


def test_unknown_without_a_near_name_or_any_choice_still_reads_well():
    assert unknown("preset", "zzz", ["tiny"]) == "unknown preset 'zzz'; valid: tiny"
    assert unknown("key", "a", []) == "unknown key 'a'; valid: (none)"
