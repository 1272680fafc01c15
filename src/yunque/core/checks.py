"""Ranges of the numbers in a configuration: each is finite and inside, or refused by its name."""

import math
from collections.abc import Callable, Mapping

from yunque.core.errors import ConfigError


def at_least(bound: int, **numbers: float) -> None:
    """Raise ``ConfigError`` unless every number is finite and ``bound`` or more.

    >>> at_least(1, tokens=512, microbatches=0)
    Traceback (most recent call last):
    yunque.core.errors.ConfigError: microbatches is 0; it must be a finite number, 1 or more
    """
    _check(numbers, lambda number: bound <= number < math.inf, f"it must be a finite number, {bound} or more")


def above_zero(**numbers: float) -> None:
    """Raise ``ConfigError`` unless every number is finite and above 0."""
    _check(numbers, lambda number: 0 < number < math.inf, "it must be a finite number above 0")


def share(**numbers: float) -> None:
    """Raise ``ConfigError`` unless every number is from 0 to 1."""
    _check(numbers, lambda number: 0 <= number <= 1, "it must be from 0 to 1")


def share_below_one(**numbers: float) -> None:
    """Raise ``ConfigError`` unless every number is at least 0 and below 1."""
    _check(numbers, lambda number: 0 <= number < 1, "it must be at least 0 and below 1")


def _check(numbers: Mapping[str, float], is_valid: Callable[[float], bool], rule: str) -> None:
    for name, number in numbers.items():
        if not is_valid(number):
            raise ConfigError(f"{name} is {number}; {rule}")
