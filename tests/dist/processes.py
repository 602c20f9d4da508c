"""Start ranks that are expected to die: exit statuses instead of results, and a kill on request."""

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing


def _worker(rank: int, world_size: int, store_path: str, fn: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(store_path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    fn(rank, world_size, *args)


def run_to_exit(
    world_size: int,
    fn: Callable,
    *args: Any,
    kill: int | None = None,
    ready: Callable[[], bool] = lambda: True,
    kill_after_seconds: float = 0.0,
) -> tuple[list[int], float]:
    """Run ``fn(rank, world_size, *args)`` on every rank; return statuses and seconds from the kill to the last exit.

    ``kill`` is a rank that gets SIGKILL ``kill_after_seconds`` after ``ready()`` has become true; -1 kills all of them.
    """
    context = torch.multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_worker, args=(rank, world_size, f"{folder}/store", fn, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        if kill is not None:
            while not ready() and all(process.is_alive() for process in ranks):
                time.sleep(0.005)
            time.sleep(kill_after_seconds)
            for process in ranks if kill == -1 else [ranks[kill]]:
                process.kill()
        started = time.monotonic()
        for process in ranks:
            process.join(timeout=60)
        seconds = time.monotonic() - started
        stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        assert not stuck, f"ranks {stuck} did not end"
        return [process.exitcode for process in ranks], seconds
