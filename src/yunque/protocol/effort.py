"""Effort levels of the OpenAI and Anthropic APIs as chat template options."""

from typing import Any

_NEAREST = {"minimal": "low", "medium": "high", "xhigh": "max"}


def effort_options(effort: str | None) -> dict[str, Any]:
    """The template options for an effort level: ``none`` turns thinking off; levels that no chat format has become the
    nearest one (``minimal`` low, ``medium`` high, ``xhigh`` max); the rest is the format's to judge.

    >>> effort_options("medium"), effort_options("none"), effort_options(None)
    ({'reasoning_effort': 'high'}, {'enable_thinking': False}, {})
    """
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": _NEAREST.get(effort, effort)}
