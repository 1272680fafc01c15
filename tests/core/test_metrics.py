"""Metrics: a resumed run's file reads as if it had never stopped."""

import math

import pytest

from yunque.core.errors import DataError
from yunque.core.metrics import JsonlSink, read_jsonl


def test_written_values_are_read_back_including_those_json_lacks(tmp_path):
    sink = JsonlSink(tmp_path / "run" / "m.jsonl")
    sink.write(1, {"loss": 2.5, "grad": math.inf})
    sink.write(2, {"loss": math.nan, "grad": -math.inf})
    first, second = read_jsonl(tmp_path / "run" / "m.jsonl")
    assert first == {"step": 1, "loss": 2.5, "grad": math.inf}
    assert math.isnan(second["loss"])
    assert second["grad"] == -math.inf
    sink.close()
    sink.close()


def test_resumed_file_equals_the_uninterrupted_one(tmp_path):
    whole, resumed = JsonlSink(tmp_path / "whole"), JsonlSink(tmp_path / "resumed")
    for step in range(1, 11):
        whole.write(step, {"loss": 1 / step})
    for step in range(1, 8):
        resumed.write(step, {"loss": 1 / step})
    resumed.close()
    again = JsonlSink(tmp_path / "resumed")
    again.truncate_after(5)
    for step in range(6, 11):
        again.write(step, {"loss": 1 / step})
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_truncation_keeps_earlier_steps_wherever_their_lines_stand(tmp_path):
    sink = JsonlSink(tmp_path / "m")
    for step in (1, 3, 2, 4):
        sink.write(step, {"v": step})
    sink.truncate_after(2)
    assert [row["step"] for row in read_jsonl(tmp_path / "m")] == [1, 2]
    sink.truncate_after(0)
    assert list(read_jsonl(tmp_path / "m")) == []


def test_half_line_of_a_killed_writer_is_cut_and_not_read(tmp_path):
    path = tmp_path / "m"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert [row["step"] for row in read_jsonl(path)] == [1]
    JsonlSink(path).write(2, {"loss": 1.0})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]


def test_a_damaged_line_is_reported_with_file_and_line(tmp_path):
    (tmp_path / "m").write_text('{"step": 1}\n{"step": \n')
    with pytest.raises(DataError, match=r"m:2: not JSON"):
        list(read_jsonl(tmp_path / "m"))
    (tmp_path / "m").write_text("[1]\n")
    with pytest.raises(DataError, match=r"m:1: expected an object with an integer 'step'"):
        list(read_jsonl(tmp_path / "m"))
    with pytest.raises(DataError, match=r"m:1: expected an object"):
        JsonlSink(tmp_path / "m").truncate_after(3)


def test_a_metric_named_step_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be named 'step'"):
        JsonlSink(tmp_path / "m").write(1, {"step": 2.0})
