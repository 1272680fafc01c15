"""What a docstring says of a function and of each of its parameters (Google's and Sphinx's ways of writing)."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?):\s*$")
_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters")
_GOOGLE = re.compile(r"^\s+(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_SPHINX = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")


@dataclass(frozen=True)
class Described:
    """The text before any section, and the parameters' own texts."""

    summary: str
    parameters: Mapping[str, str]


def described(docstring: str | None) -> Described:
    """Read a docstring; sections other than the arguments' are left out."""
    summary: list[str] = []
    parameters: dict[str, list[str]] = {}
    section, indent, current = "", 0, ""
    for line in inspect.cleandoc(docstring or "").splitlines():
        if found := _SECTION.match(line):
            section, current, indent = found[1], "", 0
        elif found := _SPHINX.match(line):
            section, current = "sphinx", found[1]
            parameters[current] = [found[2]]
        elif line.startswith(":"):
            section, current = "other", ""
        elif section in _ARGUMENT_SECTIONS and _is_entry(line, indent) and (found := _GOOGLE.match(line)):
            current, indent = found[1].lstrip("*"), len(line) - len(line.lstrip())
            parameters[current] = [found[2]]
        elif current and line.strip():
            parameters[current].append(line.strip())
        elif not section:
            summary.append(line)
    texts = {name: " ".join(part for part in parts if part) for name, parts in parameters.items()}
    return Described("\n".join(summary).strip(), {name: text for name, text in texts.items() if text})


def _is_entry(line: str, indent: int) -> bool:
    """A line indented deeper than the entries goes on with the one before it."""
    depth = len(line) - len(line.lstrip())
    return depth > 0 and (not indent or depth <= indent)
