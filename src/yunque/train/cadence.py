"""When something that happens every so many tokens is due."""

from __future__ import annotations


def is_due(tokens: int, step_tokens: int, every: int) -> bool:
    """Whether a step of ``step_tokens`` that ended at ``tokens`` crossed a multiple of ``every`` (0: never).

    A function of the position alone, so that a resumed run is due where an uninterrupted one is.
    """
    return every > 0 and tokens // every > (tokens - step_tokens) // every
