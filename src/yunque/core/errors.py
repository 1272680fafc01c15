"""The exceptions Yunque raises about other people's input, and the sentences that name the valid choices."""

import difflib
from collections.abc import Iterable


class YunqueError(Exception):
    """Every error that Yunque raises on purpose about something it was given."""


class ConfigError(YunqueError, ValueError):
    """A configuration file, override or record holds a value that cannot be used."""


class DataError(YunqueError, ValueError):
    """A data file or record is not what its format promises; the message names file and line."""


class CheckpointError(YunqueError, ValueError):
    """A checkpoint or snapshot is incomplete, damaged, or does not fit the model."""


class TemplateError(YunqueError, ValueError):
    """A conversation cannot be written in the chosen chat format."""


class Interrupted(YunqueError):
    """A run stopped because it was asked to; the message says where it stands and how to go on."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that ``name`` most likely meant, or None when nothing is close. Letter case is ignored."""
    by_folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return by_folded[close[0]] if close else None


def unknown(kind: str, name: str, choices: Iterable[str], *, where: str = "") -> str:
    """One sentence for a name that is not among ``choices``.

    >>> unknown("key", "lr_peek", ["steps", "lr_peak"], where="[train]")
    "unknown key 'lr_peek' in [train]; did you mean 'lr_peak'? valid: lr_peak, steps"
    """
    valid = sorted(choices)
    place = f" in {where}" if where else ""
    guess = nearest(name, valid)
    hint = f" did you mean {guess!r}?" if guess is not None else ""
    return f"unknown {kind} {name!r}{place};{hint} valid: {', '.join(valid) or '(none)'}"
