"""TensorBoard files hold the curves over the optimizer step, and a resume hides what it does again."""

import pytest

from observe.sinks.board import TensorBoardSink

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_curves_and_resume(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb", 0)
    for step in range(1, 8):
        sink.step({"step": step, "loss": float(step), "step_split": {"data": 0.25}, "mfu": None, "skipped": False})
    sink.evaluation(4, {"val_loss": 9.0})
    sink.event({"time": "t", "kind": "checkpoint", "step": 4})
    sink.finish({})
    sink.close()
    sink = TensorBoardSink(tmp_path / "tb", 5)
    sink.step({"step": 6, "loss": 60.0})
    sink.close()
    reader = event_accumulator.EventAccumulator(str(tmp_path / "tb"))
    reader.Reload()
    points = [(point.step, point.value) for point in reader.Scalars("train/loss")]
    assert points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, 60.0)]
    assert [point.step for point in reader.Scalars("eval/val_loss")] == [4]
    assert set(reader.Tags()["scalars"]) == {"train/loss", "train/step_split.data", "eval/val_loss"}
