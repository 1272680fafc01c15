import pytest

from yunque.core.errors import DataError
from yunque.data.report import Problem, ReadLog, ReadReport


def test_every_problem_is_counted_and_the_first_are_kept() -> None:
    log = ReadLog(keep=3)
    for line in range(10):
        log.problem("a.jsonl", line, "not JSON" if line % 2 else "blank line")
    log.document(7)
    report = log.report()
    assert report.counts == {"not JSON": 5, "blank line": 5}
    assert report.num_problems == 10
    assert [problem.line for problem in report.problems] == [0, 1, 2]
    assert str(report) == "1 documents, 0.00 MB, 10 problems (blank line: 5, not JSON: 5)"


def test_problems_are_printed_up_to_the_number_kept(caplog: pytest.LogCaptureFixture) -> None:
    log = ReadLog(keep=2)
    for line in range(5):
        log.problem("a.jsonl", line, "not JSON", "odd")
    assert [record.getMessage() for record in caplog.records] == [
        "left out: a.jsonl:0: not JSON (odd)",
        "left out: a.jsonl:1: not JSON (odd)",
    ]


def test_stop_raises_at_the_first_problem_with_its_place() -> None:
    with pytest.raises(DataError, match=r"^a\.jsonl:3: not JSON \(why\)$"):
        ReadLog("stop").problem("a.jsonl", 3, "not JSON", "why")


def test_a_report_survives_json() -> None:
    report = ReadReport(3, 40, 2, 1, (Problem("a", None, "empty file"), Problem("b", 4, "x", "y")), {"x": 9})
    assert ReadReport.from_json(report.to_json()) == report
