"""What reading found: documents, bytes, and every problem with its file, line and reason."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from yunque.core.errors import DataError
from yunque.core.logging import get_logger

OnBad = Literal["report", "stop"]

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """One piece of input that was left out: where it is, the kind of problem, and its particulars."""

    file: str
    line: int | None
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class ReadReport:
    """The outcome of reading a source: every problem counted by reason, the first ones in full.

    ``ignored`` counts what is not input at all: files of another extension, hidden entries, empty package
    marks.
    """

    documents: int = 0
    bytes: int = 0
    files: int = 0
    ignored: int = 0
    problems: tuple[Problem, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_problems(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        text = f"{self.documents:,} documents, {self.bytes / 1e6:,.2f} MB"
        if self.files:
            text += f" from {self.files:,} files"
        if self.ignored:
            text += f", {self.ignored:,} ignored"
        if not self.counts:
            return f"{text}, no problems"
        by_reason = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(self.counts.items()))
        return f"{text}, {self.num_problems:,} problems ({by_reason})"

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping; `from_json` gives an equal report back."""
        problems = [[p.file, p.line, p.reason, p.detail] for p in self.problems]
        numbers = {name: getattr(self, name) for name in ("documents", "bytes", "files", "ignored")}
        return numbers | {"problems": problems, "counts": dict(self.counts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ReadReport":
        problems = tuple(Problem(*row) for row in data["problems"])
        numbers = {name: data[name] for name in ("documents", "bytes", "files", "ignored")}
        return cls(**numbers, problems=problems, counts=dict(data["counts"]))


class ReadLog:
    """Collects one source's report while it is read, and applies its ``on_bad`` policy.

    "report" prints the first ``keep`` problems as warnings, keeps them, and counts the rest; "stop" raises
    DataError at the first.
    """

    def __init__(self, on_bad: OnBad = "report", *, keep: int = 20) -> None:
        self._on_bad = on_bad
        self._keep = keep
        self._documents = self._bytes = self._files = self._ignored = 0
        self._problems: list[Problem] = []
        self._counts: Counter[str] = Counter()

    def file(self) -> None:
        """Count a file that is being read."""
        self._files += 1

    def ignore(self) -> None:
        """Count a file or folder that is not input."""
        self._ignored += 1

    def document(self, num_bytes: int) -> None:
        """Count a document that was delivered."""
        self._documents += 1
        self._bytes += num_bytes

    def problem(self, file: str, line: int | None, reason: str, detail: str = "") -> None:
        """Record input that is left out. Raises DataError where the policy is "stop"."""
        problem = Problem(file, line, reason, detail)
        if self._on_bad == "stop":
            raise DataError(str(problem))
        self._counts[reason] += 1
        if len(self._problems) < self._keep:
            self._problems.append(problem)
            _log.warning("left out: %s", problem)

    def report(self) -> ReadReport:
        """The report so far."""
        return ReadReport(
            self._documents,
            self._bytes,
            self._files,
            self._ignored,
            tuple(self._problems),
            dict(self._counts),
        )
