"""What the launcher says about this process. The only place that touches environment variables; imports no torch."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def rank() -> int:
    """This process among all of the run, from 0."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes of the run; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process among those of its node: the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def under_torchrun() -> bool:
    """Whether torchrun watches this process (it reports any non-zero exit as a failure)."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_restarts() -> None:
    """Let torchrun end instead of starting the processes again (``--max-restarts``): nothing would be different."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 and local_rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)


@contextmanager
def no_restart_after(status: int) -> Iterator[None]:
    """What leaves with ``status`` from within is not started again."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == status:
            end_restarts()
        raise


def ask_deterministic_cublas() -> None:
    """Let cuBLAS give the same bits every time. It reads this variable when CUDA starts: call it before."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
