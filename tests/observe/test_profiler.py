"""The profiler window covers exactly its steps; off, nothing is made; an allocation record needs CUDA."""

import json

import pytest
import torch

from conf.checks import ConfigError
from conf.schema import LogConfig
from observe.profiler import build_profiler, profiled_steps

CPU = torch.device("cpu")


def run_steps(profiler, first, last):
    for step in range(first, last + 1):
        with profiler.step(step), torch.profiler.record_function(f"step_{step}"):
            torch.ones(8).sum()
    profiler.close()


def names_in(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_the_window_is_written_as_trace_and_table(tmp_path):
    run_steps(build_profiler(LogConfig(profile_start=2, profile_steps=2), tmp_path, 0, CPU), 1, 5)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["steps-2-3.json", "steps-2-3.txt"]
    names = names_in(tmp_path / "profile" / "steps-2-3.json")
    assert {"step_2", "step_3", "aten::sum"} <= names
    assert not {"step_1", "step_4"} & names
    assert "aten::sum" in (tmp_path / "profile" / "steps-2-3.txt").read_text()


def test_a_resume_inside_the_window_profiles_the_rest(tmp_path):
    run_steps(build_profiler(LogConfig(profile_start=2, profile_steps=3), tmp_path, 0, CPU), 4, 6)
    assert (tmp_path / "profile" / "steps-4-4.json").exists()


def test_a_run_that_ends_inside_the_window_keeps_what_it_has(tmp_path):
    run_steps(build_profiler(LogConfig(profile_start=2, profile_steps=9), tmp_path, 0, CPU), 1, 3)
    assert "step_3" in names_in(tmp_path / "profile" / "steps-2-unfinished.json")


@pytest.mark.parametrize(("config", "rank"), [(LogConfig(), 0), (LogConfig(profile_start=1), 1)])
def test_off_and_on_other_ranks_nothing_is_made(tmp_path, config, rank):
    run_steps(build_profiler(config, tmp_path, rank, CPU), 1, 4)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_step_still_raises(tmp_path):
    profiler = build_profiler(LogConfig(profile_start=1, profile_steps=1), tmp_path, 0, CPU)
    with pytest.raises(ZeroDivisionError), profiler.step(1):
        raise ZeroDivisionError
    profiler.close()
    assert (tmp_path / "profile" / "steps-1-unfinished.json").exists()


def test_an_unwritable_profile_is_a_warning(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file is in the way")
    run_steps(build_profiler(LogConfig(profile_start=1, profile_steps=1), tmp_path, 0, CPU), 1, 2)
    assert "profile cannot be written" in caplog.text


def test_an_allocation_record_needs_cuda(tmp_path):
    with pytest.raises(ConfigError, match="log.memory_snapshot=true .* the device is cpu"):
        build_profiler(LogConfig(memory_snapshot=True), tmp_path, 0, CPU)


def test_profiled_steps():
    assert list(profiled_steps(LogConfig())) == []
    assert list(profiled_steps(LogConfig(profile_start=4, profile_steps=2))) == [4, 5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_allocations_are_recorded_at_the_end_and_when_memory_runs_out(tmp_path):
    device = torch.device("cuda")
    profiler = build_profiler(LogConfig(memory_snapshot=True), tmp_path, 0, device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**50, dtype=torch.uint8, device=device)
    path = tmp_path / "profile" / "memory_snapshot_rank0.pickle"
    written = path.stat().st_mtime_ns
    profiler.close()
    assert path.stat().st_mtime_ns == written
    profiler = build_profiler(LogConfig(memory_snapshot=True), tmp_path, 0, device)
    profiler.close()
    assert path.stat().st_mtime_ns > written
