"""Device and process group of a run.

A group exists in every run, also of one process, so that no caller asks whether it is distributed. CUDA runs carry
two backends: NCCL for device tensors and gloo for CPU tensors and objects.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed

from conf.checks import ConfigError
from dist import agree, env


def choose_device(name: str) -> torch.device:
    """The device of this process for ``run.device``: ``cpu``, ``cuda`` or ``auto``.

    Raises ``ConfigError`` when ``cuda`` is asked for and there is no GPU for this process.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and available == 0):
        return torch.device("cpu")
    if env.local_rank() >= available:
        raise ConfigError(
            f"run.device={name}: process {env.local_rank()} of this node has no GPU of its own ({available} found). "
            "Start at most one process per GPU, or set run.device=cpu."
        )
    return torch.device("cuda", env.local_rank())


@contextmanager
def process_group(device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the run's process group and leave it at the end.

    Meanwhile a rank that another's failure would leave in a collective is ended (``agree.FailureWatch``).
    """
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    if env.world_size() == 1 and not env.under_torchrun():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        torch.distributed.init_process_group(backend, timeout=timeout)
    watch = agree.FailureWatch() if env.world_size() > 1 else None
    try:
        yield
    finally:
        if watch is not None:
            watch.stop()
        torch.distributed.destroy_process_group()
