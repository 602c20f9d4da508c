"""summary.json: every key is there, unknown is null, and the figures follow from the records."""

import json
import math
import subprocess

import pytest

from observe import summary
from observe.summary import KEYS, Totals, build_summary, write_summary

DESIGN_KEYS = {
    "status", "steps", "loss", "val_loss", "tokens", "tokens_per_second", "tokens_per_second_per_device", "mfu",
    "parameters", "optimizer_state_bytes", "optimizer_state_bytes_per_param", "memory", "microbatch", "accumulation",
    "world_size", "config_hash", "versions",
}  # fmt: skip


def record(step, rate, steady=True, **fields):
    return {
        "step": step,
        "loss": 1 / step,
        "tokens": 100 * step,
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate / 2,
        "mfu": None,
        "step_seconds": 1.0,
        "steady": steady,
        **fields,
    }


def test_an_empty_run_has_every_key_and_no_number():
    result = build_summary(Totals(), {})
    assert DESIGN_KEYS <= set(KEYS) == set(result)
    known = {"mfu_convention", "versions", "throughput_steps"}
    assert all(result[key] is None for key in set(KEYS) - known)
    assert result["throughput_steps"] == 0


def test_median_leaves_out_first_and_profiled_steps():
    totals = Totals(profiled=range(5, 7))
    rates = {1: 1.0, 2: 10.0, 3: 12.0, 4: 11.0, 5: 2.0, 6: 2.0}
    for step, rate in rates.items():
        totals.add(record(step, rate, steady=step > 1))
    figures = totals.figures()
    assert figures["tokens_per_second"] == 11.0
    assert figures["tokens_per_second_per_device"] == 5.5
    assert figures["mfu"] is None
    assert figures["throughput_steps"] == 3
    assert (figures["first_step"], figures["last_step"], figures["tokens"]) == (1, 6, 600)
    assert figures["loss"] == 1 / 6


def test_a_resume_counts_this_session_and_falls_back_on_the_earlier_one():
    earlier = [record(1, 1.0, steady=False), record(2, 10.0), record(3, 20.0, val_loss=2.5)]
    totals = Totals(earlier)
    assert totals.figures()["tokens_per_second"] == 15.0
    assert totals.figures()["val_loss"] == 2.5
    totals.add(record(4, 3.0, steady=False))
    assert totals.figures()["tokens_per_second"] == 15.0
    totals.add(record(5, 40.0))
    figures = totals.figures()
    assert (figures["tokens_per_second"], figures["first_step"], figures["last_step"]) == (40.0, 1, 5)


def test_evaluations_and_memory():
    totals = Totals()
    totals.add(record(1, 1.0, memory={"process_peak": 5, "device_peak_reserved": None}, val_loss=3.0))
    totals.add(record(2, 1.0, memory={"process_peak": 4, "device_peak_reserved": None}))
    assert totals.figures()["peak_memory"] == {"process_peak": 5}
    assert totals.figures()["val_loss"] == 3.0
    totals.add_evaluation(2, {"val_loss": 2.0})
    assert totals.figures()["val_loss"] == 2.0


def test_what_the_trainer_knows_wins():
    totals = Totals()
    totals.add(record(3, 1.0))
    result = build_summary(
        totals, {"status": "done", "loss": 0.5, "optimizer_state_bytes": 80, "parameters": 10, "own": 1}
    )
    assert (result["status"], result["loss"], result["own"]) == ("done", 0.5, 1)
    assert result["optimizer_state_bytes_per_param"] == 8.0


def test_the_file_is_valid_json_and_replaced_whole(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_summary(path, {"bad": object()})
    assert path.read_text() == "old"
    write_summary(path, {"loss": math.nan, "status": "done"})
    assert json.loads(path.read_text()) == {"loss": None, "status": "done", "nonfinite": ["loss"]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_versions_name_the_revision_of_a_repository(tmp_path, monkeypatch):
    def git(*arguments):
        options = ["-c", "user.name=n", "-c", "user.email=e@localhost", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *options, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(summary, "_ROOT", tmp_path)
    assert summary._git_state() == (None, None)
    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "first")
    revision, dirty = summary._git_state()
    assert len(revision) == 40 and dirty is False
    (tmp_path / "file").write_text("b")
    assert summary._git_state() == (revision, True)
    # a copy without .git inside a repository is not that repository
    (tmp_path / "inside").mkdir()
    monkeypatch.setattr(summary, "_ROOT", tmp_path / "inside")
    assert summary._git_state() == (None, None)


def test_versions_without_git_or_package(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(summary, "_ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert summary._git_state() == (None, None)
    assert summary._version("no-such-package") is None
    assert summary.versions()["torch"].startswith("2.")
