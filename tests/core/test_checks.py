"""Ranges: their bounds are exact, and nothing that is not finite is inside."""

import math
from collections.abc import Callable

import pytest

from yunque.core.checks import above_zero, at_least, share, share_below_one
from yunque.core.errors import ConfigError

SMALLEST = math.ulp(0.0)


@pytest.mark.parametrize(
    ("check", "inside", "outside"),
    [
        (lambda **n: at_least(0, **n), (0, 0.0, 1, 1e300), (-1, -SMALLEST)),
        (lambda **n: at_least(2, **n), (2, 3), (1, 0)),
        (above_zero, (SMALLEST, 1e300), (0, 0.0, -1.0)),
        (share, (0, 0.5, 1), (-SMALLEST, math.nextafter(1, 2))),
        (share_below_one, (0, 0.5, math.nextafter(1, 0)), (-SMALLEST, 1)),
    ],
)
def test_bounds_are_exact(check: Callable[..., None], inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    for number in inside:
        check(size=number)
    for number in (*outside, math.inf, -math.inf, math.nan):
        with pytest.raises(ConfigError, match="size is"):
            check(size=number)


def test_the_number_that_is_wrong_is_named_with_its_value_and_what_is_valid() -> None:
    with pytest.raises(ConfigError) as error:
        at_least(1, tokens=512, microbatches=0)
    assert str(error.value) == "microbatches is 0; it must be a finite number, 1 or more"
