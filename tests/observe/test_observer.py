"""Who gets what when, over a resume and over ranks, and that no destination ends a run."""

import json
import time
from pathlib import Path

import pytest

from conf.schema import Config, LogConfig, WandbConfig
from observe import observer as observer_module
from observe.observer import build_observer
from observe.sinks.jsonl import read_lines
from tests.observe import wandb_file
from tests.observe.disk import full_at
from tests.spawn import run_ranks

HEADER = {"model": "m", "parameters": 10, "world_size": 2, "microbatch": 4, "accumulation": 1}


def build_config(wandb="disabled", **log):
    config = Config(log=LogConfig(wandb=WandbConfig(mode=wandb), **{"console": False, **log}), microbatch=1)
    return config


def record(step, seconds=1.0, **fields):
    rate = 100 / seconds
    return {
        "step": step,
        "loss": 5.0 - step / 10,
        "lr": 0.1,
        "tokens": 100 * step,
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate / 2,
        "mfu": rate / 1000,
        "step_seconds": seconds,
        "step_split": {"data": seconds / 4, "other": 0.75 * seconds},
        "steady": step > 1,
        **fields,
    }


def test_a_run_and_its_resume(tmp_path):
    config = build_config()
    observer = build_observer(config, tmp_path, True, 0, HEADER)
    for step in range(1, 8):
        observer.step(record(step, **({"val_loss": 4.0} if step == 4 else {})))
    observer.event("checkpoint", 5, seconds=1)
    observer.close()
    observer = build_observer(config, tmp_path, True, 5, HEADER)
    for step in range(6, 11):
        observer.step(record(step))
    observer.evaluation(10, {"val_loss": 3.5})
    summary = observer.finish({"status": "done", "steps": 10})
    observer.close()
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert (lines[3]["val_loss"], lines[9]["val_loss"]) == (4.0, 3.5)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["val_loss"], summary["tokens"], summary["first_step"]) == ("done", 3.5, 1000, 1)
    assert summary["world_size"] == 2 and len(summary["config_hash"]) == 12
    assert summary["throughput_steps"] == 5
    assert (tmp_path / "loss.png").exists()


def test_events_have_the_format_of_the_run_folder(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"time":"2025-01-01T00:00:00.000+00:00","kind":"start","changed":{}}\n')
    observer = build_observer(build_config(), tmp_path, True, 0, HEADER)
    observer.event("skip", 3, loss=float("nan"))
    observer.event("note")
    start, skip, note = read_lines(tmp_path / "events.jsonl")
    assert start["kind"] == "start"
    assert list(skip)[:3] == ["time", "kind", "step"]
    assert (skip["kind"], skip["step"], skip["loss"], skip["nonfinite"]) == ("skip", 3, None, ["loss"])
    assert len(skip["time"]) == len(start["time"]) and skip["time"].endswith("+00:00")
    assert note["step"] is None


class Recorder:
    name = "recorder"
    every_step = False

    def __init__(self) -> None:
        self.steps = []

    def step(self, record):
        self.steps.append(record)


def test_an_interval_shows_means_of_rates_and_the_last_of_the_rest(tmp_path):
    observer = build_observer(build_config(interval=4), tmp_path, True, 0, HEADER)
    recorder = Recorder()
    observer._sinks.append(recorder)
    for step, seconds in zip(range(1, 10), [9.0, 1.0, 1.0, 1.0, 2.0, 1.0, 0.5, 0.5, 7.0], strict=True):
        observer.step(record(step, seconds))
    assert [shown["step"] for shown in recorder.steps] == [4, 8]
    second = recorder.steps[1]
    # 400 tokens in 4 s
    assert second["tokens_per_second"] == pytest.approx(100.0)
    assert second["tokens_per_second_per_device"] == pytest.approx(50.0)
    assert second["mfu"] == pytest.approx(0.1)
    assert second["step_seconds"] == pytest.approx(1.0)
    assert second["step_split"] == pytest.approx({"data": 0.25, "other": 0.75})
    assert (second["loss"], second["tokens"]) == (5.0 - 0.8, 800)
    # every step is in the file all the same, with its own figures
    assert read_lines(tmp_path / "metrics.jsonl")[6]["tokens_per_second"] == 200.0


def test_an_interval_keeps_unknown_unknown(tmp_path):
    observer = build_observer(build_config(interval=2), tmp_path, True, 0, HEADER)
    recorder = Recorder()
    observer._sinks.append(recorder)
    for step in (1, 2):
        observer.step(record(step) | {"mfu": None})
    observer.step({"step": 3, "loss": 1.0})
    observer.step({"step": 4, "loss": 1.0})
    assert recorder.steps[0]["mfu"] is None
    assert recorder.steps[1] == {"step": 4, "loss": 1.0}


def test_a_failing_destination_is_one_warning(tmp_path, caplog):
    observer = build_observer(build_config(), tmp_path, True, 0, HEADER)

    class Broken(Recorder):
        name = "broken"
        every_step = True

        def __getattribute__(self, name):
            if name in ("step", "evaluation", "event", "finish", "close"):
                return self.fail
            return object.__getattribute__(self, name)

        def fail(self, *arguments):
            raise RuntimeError("out of order")

    observer._sinks.insert(0, Broken())
    for step in (1, 2, 3):
        observer.step(record(step))
    observer.evaluation(3, {"val_loss": 1.0})
    observer.event("note")
    observer.finish({"status": "done"})
    observer.close()
    assert caplog.text.count("broken cannot be written (RuntimeError: out of order)") == 1
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3
    assert (tmp_path / "summary.json").exists()


def test_a_full_disk_ends_nothing(tmp_path, caplog):
    config = build_config(wandb="offline", tensorboard=True)
    with full_at(200):
        observer = build_observer(config, tmp_path, True, 0, HEADER)
        for step in range(1, 6):
            observer.step(record(step))
        began = time.monotonic()
        observer.finish({"status": "done"})
        observer.close()
    assert time.monotonic() - began < 30
    for name in ("metrics.jsonl", "summary.json", "loss.png", "TensorBoard"):
        assert caplog.text.count(f"{name} cannot be written") == 1
    assert not (tmp_path / "summary.json").exists()


def test_closing_twice_and_after_a_failure(tmp_path):
    observer = build_observer(build_config(), tmp_path, True, 0, HEADER)
    observer.step(record(1))
    observer.close()
    observer.close()
    observer.step(record(2))
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 1


def test_the_run_of_a_checkpoint_goes_on_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(observer_module.WandbSink, "_open", lambda self, mode: setattr(self, "_finished", True))
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    config = build_config(wandb="offline")
    state = build_observer(config, folders[0], True, 0, HEADER).state
    assert build_observer(config, folders[1], True, 5, HEADER, state).state == state
    assert build_observer(build_config(), folders[1], True, 5, HEADER).state == {}


def observe_on_every_rank(rank, world_size, folder):
    observer = build_observer(build_config(wandb="offline"), folder, rank == 0, 0, HEADER)
    for step in range(1, 5):
        observer.step(record(step, **({"val_loss": 1.0} if step % 2 == 0 else {})))
    observer.event("checkpoint", 4)
    summary = observer.finish({"status": "done"})
    observer.close()
    return summary


def test_one_rank_records(tmp_path):
    main, other = run_ranks(2, observe_on_every_rank, tmp_path)
    assert main["status"] == "done" and other == {}
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    (session,) = Path(tmp_path).glob("wandb/offline-run-*")
    rows = wandb_file.history(session)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/val_loss" in row] == [2, 4]
    assert [row["step"] for row in rows if "checkpoint/step" in row] == [4]
