"""Background: an error that is wrongly taken for a lack of memory restarts a broken run for ever, and one that is not
recognised ends a run that a smaller microbatch would save."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed

from dist import ending
from dist.agree import FailureWatch
from dist.out_of_memory import RESTART_STATUS, add_report, is_out_of_memory, read_reports
from tests.dist.processes import run_to_exit

MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity)"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("HIP out of memory. Tried to allocate 256.00 MiB"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("XPU out of memory. Tried to allocate 1.00 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 5.00 GB, other allocations: 3.00 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                 "to allocate 17179869184 bytes. Error code 12 (Cannot allocate memory)"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
    RuntimeError("NCCL error in: ../ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL version 2.18.1\n"
                 "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError("NCCL error: out of memory"),
]  # fmt: skip
OTHER = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x4)"),
    AssertionError("out of memory"),
    ValueError("CUDA out of memory"),
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    ),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("an error occurred in the memory format conversion"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("[tcp/pair.cc:446] Connection closed by peer"),
    OSError(28, "No space left on device"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", MEMORY, ids=lambda error: f"{type(error).__name__} {str(error)[:40]}")
def test_memory_has_run_out(error: BaseException):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER, ids=lambda error: f"{type(error).__name__} {str(error)[:40]}")
def test_something_else_went_wrong(error: BaseException):
    assert not is_out_of_memory(error)


def test_what_an_error_was_raised_from_counts_and_what_it_came_after_does_not():
    def fail(cause: BaseException | None) -> None:
        try:
            raise MEMORY[0]
        except RuntimeError:
            raise ValueError("wrapped") from cause

    with pytest.raises(ValueError) as caused:
        fail(MEMORY[0])
    assert is_out_of_memory(caused.value)
    with pytest.raises(ValueError) as after:
        fail(None)
    assert not is_out_of_memory(after.value)
    # a chain that bites its tail ends
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_a_real_allocation_that_cannot_succeed():
    with pytest.raises(RuntimeError) as info:
        torch.empty(2**60)
    assert is_out_of_memory(info.value)


def test_reports_add_up(tmp_path: Path):
    assert read_reports(tmp_path) == []
    for rows in (8, 4):
        add_report(tmp_path, {"rows": rows, "phase": "backward"})
    assert [report["rows"] for report in read_reports(tmp_path)] == [8, 4]


def run_out(rank: int, world_size: int, folder: str, fault: str, failing: int) -> None:
    """All ranks but one are within a collective when that one fails."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    watch = FailureWatch()
    try:
        if rank == failing:
            raise (
                RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.") if fault == "memory" else KeyError("x")
            )
        torch.distributed.all_reduce(torch.zeros(3))
        watch.stop()
    except BaseException as error:
        ending.fail(error, Path(folder), started=True, attempt={"step": 7, "rows": 8})


@pytest.mark.parametrize("world_size, failing", [(1, 0), (2, 0), (2, 1), (3, 1), (4, 0), (4, 3)])
@pytest.mark.parametrize("fault, status", [("memory", RESTART_STATUS), ("other", 1)])
def test_all_ranks_leave_with_the_status_of_the_one_that_failed(world_size, failing, fault, status, tmp_path, capfd):
    statuses, seconds = run_to_exit(world_size, run_out, str(tmp_path), fault, failing)
    assert statuses == [status] * world_size
    assert seconds < 10
    assert capfd.readouterr().err.count("error: ") == 1
    outcome = json.loads((tmp_path / "status.json").read_text())
    assert outcome["outcome"] == ("oom" if fault == "memory" else "failed")
    reports = [{key: report[key] for key in ("step", "rows", "rank")} for report in read_reports(tmp_path)]
    assert reports == ([{"step": 7, "rows": 8, "rank": failing}] if fault == "memory" else [])


def stuck(rank: int, world_size: int, folder: str) -> None:
    """The rank that does not fail is where no exception reaches it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    FailureWatch(interval_seconds=0.1)
    if rank == 0:
        time.sleep(50)
    ending.fail(MemoryError(), Path(folder), started=True, attempt={})


def test_a_rank_that_hangs_leaves_with_it_too(tmp_path: Path):
    statuses, seconds = run_to_exit(2, stuck, str(tmp_path))
    assert statuses == [RESTART_STATUS] * 2 and seconds < 10


def test_nothing_to_change_is_a_failure(tmp_path: Path):
    def run(rank: int, world_size: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        ending.fail(MemoryError("no room"), tmp_path, started=True)

    statuses, _ = run_to_exit(1, run)
    assert statuses == [1]
    assert json.loads((tmp_path / "status.json").read_text())["outcome"] == "oom"
    assert read_reports(tmp_path) == []
