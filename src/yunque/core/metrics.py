"""Where a run's numbers go: a sink takes one step's named values at a time."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from yunque.core.errors import DataError
from yunque.core.files import write_atomic

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricSink(Protocol):
    """Receives the metrics of a run in the order they happen."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step."""
        ...

    def close(self) -> None:
        """Finish; nothing is written afterwards."""
        ...


class JsonlSink:
    """Appends one JSON object a line, ``{"step": 3, "loss": 2.5}``, each flushed to the system when written.

    Opening a file that another process left with half a line at its end removes that half line. Numbers that
    JSON lacks are written as the strings "NaN", "Infinity" and "-Infinity"; `read_jsonl` turns them back.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_half_line(self.path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (lives until close)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line. A value named "step" is refused: it would hide the step."""
        if "step" in values:
            raise DataError("a metric cannot be named 'step': that key holds the step itself")
        row = {"step": int(step)} | {name: _to_json(float(value)) for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Forget the lines of steps later than ``step``, so that a run resumed there does not repeat them."""
        self._file.close()
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for number, line in enumerate(lines, start=1) if _row(line, self.path, number)["step"] <= step]
        if len(kept) < len(lines):
            write_atomic(self.path, "".join(kept))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (lives until close)

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._file.close()


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file, oldest first; a half-written last line (no newline yet) is left out.

    Raises DataError with file and line for a line that is not a JSON object.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            row = _row(line, path, number)
            yield {
                key: _NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in row.items()
            }


def _row(line: str, path: str | os.PathLike[str], number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not JSON: {error.msg}") from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise DataError(f"{path}:{number}: expected an object with an integer 'step'")
    return row


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _cut_half_line(path: Path) -> None:
    """Cut what follows the last newline: the process that wrote it died before the line was whole."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
