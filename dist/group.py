"""Device and process group of a run.

A group exists in every run, also of one process, so that no caller asks whether it is distributed. CUDA runs carry
two backends: NCCL for device tensors and gloo for CPU tensors and objects.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

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
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        own = fresh_store(store, rank, world_size, timeout_seconds)
        torch.distributed.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)
    watch = agree.FailureWatch() if env.world_size() > 1 else None
    try:
        yield
    finally:
        if watch is not None:
            watch.stop()
        torch.distributed.destroy_process_group()


def fresh_store(store: Store, rank: int, world_size: int, timeout_seconds: float) -> Store:
    """The part of ``store`` that belongs to this start alone; collective.

    torchrun keeps one store over ``--max-restarts``: the addresses and the failure that an earlier start left in it
    would be taken for this one's, and its count of restarts differs between nodes (pytorch issue 135712). So rank 0
    names the start, and a rank believes the name only once rank 0 has repeated the word that this very process sent.

    Raises:
        RuntimeError: when a rank has not come after ``timeout_seconds``.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout_seconds
    if rank == 0:
        store.set("gossamer/start", word)
        others = {r: f"gossamer/start/{word}/{r}" for r in range(1, world_size)}
        while missing := [r for r, key in others.items() if not store.check([key])]:
            _wait_for(f"ranks {missing}", deadline, timeout_seconds)
        store.set(f"gossamer/start/{word}", " ".join(store.get(key).decode() for key in others.values()))
        return PrefixStore(word, store)
    answered = ""
    while True:
        name = store.get("gossamer/start").decode()
        if name != answered:
            store.set(f"gossamer/start/{name}/{rank}", word)
            answered = name
        # an earlier start has its words there, not this one
        if store.check([f"gossamer/start/{name}"]) and word in store.get(f"gossamer/start/{name}").decode():
            return PrefixStore(name, store)
        _wait_for("rank 0", deadline, timeout_seconds)


def _wait_for(whom: str, deadline: float, timeout_seconds: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"{whom} did not come to the start within parallel.timeout_seconds={timeout_seconds:g}. "
            "Look at their nodes and logs; raise it if they only start later."
        )
    time.sleep(0.02)
