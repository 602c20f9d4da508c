"""Run one function on several gloo processes, without a GPU and without a port."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first DTensor imports it: here, or a second later in every rank
import torch.distributed
import torch.multiprocessing


def _worker(rank: int, world_size: int, folder: str, fn: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        torch.save(fn(rank, world_size, *args), f"{folder}/result{rank}")
    finally:
        torch.distributed.destroy_process_group()


def run_ranks(world_size: int, fn: Callable, *args: Any) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on every rank and return the ranks' results in order.

    Processes are forked, which is several times faster than a fresh start: a test that uses CUDA or numba's OpenMP
    layer must not use this. The first failing rank's error is raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _worker, args=(world_size, folder, fn, args), nprocs=world_size, start_method="fork"
        )
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(world_size)]


def run_apart(fn: Callable, *args: Any) -> Any:
    """Run ``fn(*args)`` in a forked process and return its result.

    For what makes a fake process group: torch keeps offsets of shards by shape and mesh, and forked ranks of later
    tests would take those of rank 0 for their own.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(_apart, args=(folder, fn, args), nprocs=1, start_method="fork")
        return torch.load(Path(folder) / "result", weights_only=False)


def _apart(index: int, folder: str, fn: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    torch.save(fn(*args), f"{folder}/result")
