"""metrics.jsonl stays valid JSON with each step once: non-finite numbers, resumes, kills, a full disk, evaluations."""

import json
import math

import pytest

from observe.sinks.jsonl import EventsSink, JsonlFile, MetricsSink, encode, read_lines
from tests.observe.disk import full_at


def steps_of(path):
    lines = path.read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def write_steps(path, first, last, start=0):
    sink = MetricsSink(path, start)
    for step in range(first, last + 1):
        sink.step({"step": step, "loss": 1 / step})
    sink.close()


def refuse_constant(text):
    raise AssertionError(f"{text} is not JSON")


def test_non_finite_numbers_become_null_and_are_named():
    text = encode({"step": 1, "loss": math.nan, "split": {"data": math.inf}, "list": [1.0, -math.inf], "lr": 0.1})
    record = json.loads(text, parse_constant=refuse_constant)
    assert record["loss"] is None and record["split"]["data"] is None and record["list"] == [1.0, None]
    assert record["nonfinite"] == ["loss", "split.data", "list.1"]
    assert "nonfinite" not in encode({"step": 1, "loss": 2.0})


def test_every_step_is_on_disk_at_once(tmp_path):
    sink = MetricsSink(tmp_path / "m", 0)
    for step in (1, 2, 3):
        sink.step({"step": step})
        assert steps_of(tmp_path / "m") == list(range(1, step + 1))


@pytest.mark.parametrize(
    ("resumed_from", "expected"), [(3, [1, 2, 3]), (5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5]), (0, [])]
)
def test_resume_drops_what_comes_after(tmp_path, resumed_from, expected):
    path = tmp_path / "m"
    write_steps(path, 1, 5)
    sink = MetricsSink(path, resumed_from)
    assert steps_of(path) == expected
    assert [record["step"] for record in sink.earlier] == expected
    sink.step({"step": resumed_from + 1})
    assert steps_of(path) == [*expected, resumed_from + 1]


def test_two_resumes_leave_each_step_once(tmp_path):
    path = tmp_path / "m"
    write_steps(path, 1, 8)
    write_steps(path, 6, 9, start=5)
    write_steps(path, 8, 10, start=7)
    assert steps_of(path) == list(range(1, 11))


def test_a_resume_repairs_a_torn_line_and_doubles(tmp_path):
    path = tmp_path / "m"
    write_steps(path, 1, 3)
    with path.open("a") as file:
        file.write('{"step":2,"loss":9}\n{"step":4,"lo')
    sink = MetricsSink(path, 4)
    assert [(record["step"], record["loss"]) for record in sink.earlier] == [(1, 1.0), (2, 9), (3, 1 / 3)]
    assert read_lines(path) == sink.earlier


def test_an_untouched_file_is_not_rewritten(tmp_path):
    path = tmp_path / "m"
    write_steps(path, 1, 3)
    inode = path.stat().st_ino
    MetricsSink(path, 3).close()
    assert path.stat().st_ino == inode


def test_an_evaluation_joins_the_line_of_its_step(tmp_path):
    path = tmp_path / "m"
    sink = MetricsSink(path, 0)
    sink.step({"step": 1, "loss": math.nan})
    sink.step({"step": 2, "loss": 2.0})
    sink.evaluation(2, {"val_loss": 3.0})
    sink.evaluation(2, {"val_loss": math.inf, "val_tokens": 10})
    sink.step({"step": 3, "loss": 1.0})
    lines = [json.loads(line, parse_constant=refuse_constant) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1] == {"step": 2, "loss": 2.0, "val_loss": None, "val_tokens": 10, "nonfinite": ["val_loss"]}


def test_an_evaluation_after_a_resume_joins_the_last_line(tmp_path):
    path = tmp_path / "m"
    write_steps(path, 1, 5)
    MetricsSink(path, 4).evaluation(4, {"val_loss": 3.0})
    assert read_lines(path)[-1] == {"step": 4, "loss": 0.25, "val_loss": 3.0}


def test_an_evaluation_before_the_first_step_has_its_own_line(tmp_path):
    sink = MetricsSink(tmp_path / "m", 0)
    sink.evaluation(0, {"val_loss": 9.0})
    sink.step({"step": 1})
    assert steps_of(tmp_path / "m") == [0, 1]


def test_a_shorter_line_leaves_no_rest(tmp_path):
    path = tmp_path / "m"
    sink = MetricsSink(path, 0)
    sink.step({"step": 1, "val_loss": 3.123456789})
    sink.evaluation(1, {"val_loss": 3.0})
    sink.step({"step": 2})
    assert path.read_text() == '{"step":1,"val_loss":3.0}\n{"step":2}\n'


def test_a_full_disk_leaves_whole_lines(tmp_path):
    path = tmp_path / "m"
    sink = MetricsSink(path, 0)
    sink.step({"step": 1, "text": "x" * 50})
    before = path.read_bytes()
    with full_at(len(before) + 20):
        with pytest.raises(OSError):
            sink.step({"step": 2, "text": "y" * 50})
        assert path.read_bytes() == before
        with pytest.raises(OSError):
            sink.evaluation(1, {"val_loss": 2.0, "val_text": "z" * 50})
        assert path.read_bytes() == before
    sink.step({"step": 3})
    assert steps_of(path) == [1, 3]


def test_events_are_kept_over_a_restart_and_a_torn_line(tmp_path):
    path = tmp_path / "e"
    sink = EventsSink(path)
    sink.event({"kind": "a"})
    sink.close()
    with path.open("a") as file:
        file.write('{"kind":"to')
    sink = EventsSink(path)
    sink.event({"kind": "b"})
    assert [record["kind"] for record in read_lines(path)] == ["a", "b"]


def test_another_writer_of_the_same_file_is_not_overwritten(tmp_path):
    path = tmp_path / "e"
    file = JsonlFile(path)
    file.append({"kind": "a"})
    with path.open("a") as other:
        other.write('{"kind":"theirs"}\n')
    file.append({"kind": "b"})
    assert [record["kind"] for record in read_lines(path)] == ["a", "theirs", "b"]


def test_reading_nothing(tmp_path):
    assert read_lines(tmp_path / "absent") == []
