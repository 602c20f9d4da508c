"""A model small enough to train on four processes in a second, its data, and ways to run ``train.py`` on it.

Runs are deterministic, which also makes torch fill new memory with NaN: a read of uninitialised memory shows. UNEVEN
has widths that 2, 3 and 4 ranks do not divide, so that shards differ.
"""

import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import train  # here, not in the ranks: forked processes share what is imported
from conf import compose
from conf.command import read_command_line
from dist.run_folder import agree_run_folder
from memopt import Gefen
from tests.spawn import run_ranks

ROOT = Path(__file__).parents[1]
TINY = [
    "model.dim=64", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.hidden=96", "model.vocab_size=300",
    "data.vocab_size=300", "train.seq_len=32", "train.global_batch=12", "train.steps=6", "train.eval_interval=0",
    "train.eval_tokens=1500", "train.loss_chunk=50", "schedule.warmup=2", "microbatch=12", "checkpoint.interval=0",
    "train.deterministic=true", "run.sample_tokens=8", "run.device=cpu", "log.wandb.mode=disabled",
]  # fmt: skip
UNEVEN = ["model.dim=66", "model.heads=3", "model.kv_heads=1", "model.hidden=90"]


def write_corpus(folder: Path) -> Path:
    """Some documents of made-up words, the same every time: a vocabulary of 300 and about 20,000 tokens."""
    source = random.Random(0)
    words = ["".join(source.choice("abcdefghijklmnop ") for _ in range(source.randint(2, 7))) for _ in range(200)]
    folder.mkdir(parents=True)
    for number in range(40):
        lines = [" ".join(source.choices(words, k=12)) for _ in range(12)]
        (folder / f"document{number:02}.txt").write_text("\n".join(lines))
    return folder


def prepare_tokens(folder: Path) -> Path:
    """Tokenise the corpus into ``folder/tokens``, with enough held out for an evaluation."""
    from data.prepare import prepare

    corpus = write_corpus(folder / "corpus")
    overrides = ["data=text", f"data.path={corpus}", f"data.dir={folder / 'tokens'}", "data.vocab_size=300"]
    prepare(compose.load_config([*overrides, "data.val_share=0.15", "data.workers=1"]).data)
    return folder / "tokens"


def train_ranks(world_size: int, tokens: Path, *overrides: str, hook: Any = None) -> list[dict[str, Any]]:
    """Train TINY on ``tokens`` in ``world_size`` processes; each rank's ``train_here`` result."""
    prepare_to_fork(overrides)
    return run_ranks(world_size, _train_rank, str(tokens), overrides, hook)


def prepare_to_fork(overrides: Sequence[str]) -> None:
    """Compile here what the ranks run: forked processes have it then, and each would take seconds for it."""
    if any("gefen" in override for override in overrides):
        _compile_gefen()


@functools.cache
def _compile_gefen() -> None:
    Gefen([torch.nn.Parameter(torch.zeros(2, 2))]).init_state()


def _train_rank(rank: int, world_size: int, tokens: str, overrides: tuple[str, ...], hook: Any) -> dict[str, Any]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    return train_here(world_size, tokens, overrides, hook)


def train_here(world_size: int, tokens: str, overrides: tuple[str, ...], hook: Any = None) -> dict[str, Any]:
    """Build and train a run in this process, whose process group exists.

    Returns the outcome, the records of its steps, the sample ids of each, whole weights and optimizer state by name.
    ``hook(run)`` is called before training; what it returns is ``noted``, as it stands at the end.
    """
    config = compose.load_config([*TINY, "data=tokens", f"data.path={tokens}", *overrides], world_size)
    folder = agree_run_folder(config, compose.to_yaml(config))
    run = train.build_run(config, train.open_run_data(config), folder, torch.device("cpu"))
    result: dict[str, Any] = {"records": [], "ids": [], "folder": str(run.folder), "start": run.step}
    _spy(run, result)
    if hook is not None:
        result["noted"] = hook(run)
    result["outcome"] = train.train(run)
    train.finish(run, result["outcome"])
    tensors = train.tensors_of(run.model, run.optimizer.state_tensors())
    result["tensors"] = {name: _whole(tensor).clone() for name, tensor in tensors.items()}
    return result


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _spy(run: Any, result: dict[str, Any]) -> None:
    step, batch = run.observer.step, type(run.loader).__next__

    class Spied(type(run.loader)):
        def __next__(self):
            taken = batch(self)
            result["ids"].append(taken.sample_ids.tolist())
            return taken

    run.loader.__class__ = Spied
    run.observer.step = lambda record: (result["records"].append(record), step(record))


def losses(result: dict[str, Any]) -> torch.Tensor:
    """The loss of every step, fp64."""
    return torch.tensor([record["loss"] for record in result["records"]], dtype=torch.float64)


def run_train(arguments: list[str], processes: int = 0, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """``python train.py`` or, with ``processes``, the same under torchrun: slow, but what a user starts."""
    launcher = [sys.executable]
    if processes:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        launcher.append(f"--max-restarts={restarts}")
    command = [*launcher, "train.py", *TINY, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@dataclass
class Ended:
    """How the processes of ``fork_train`` ended: exit status and standard error of each rank, and the seconds from the
    first one's end to the last one's."""

    statuses: list[int | None]
    errors: list[str]
    seconds: float

    def messages(self) -> list[str]:
        """The error messages of all ranks together."""
        return [line for text in self.errors for line in text.splitlines() if line.startswith("error: ")]


def fork_train(processes: int, arguments: list[str], change: Callable[[], None] | None = None) -> Ended:
    """``train.main`` in forked processes that meet over a port, as torchrun starts them but without its watching.

    ``change`` is called in each process before. A process that is still there 30 s after the first one ended is killed
    and its status is None.
    """
    prepare_to_fork(arguments)
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        context = multiprocessing.get_context("fork")
        started = [
            context.Process(target=_main, args=(rank, processes, port, folder, arguments, change))
            for rank in range(processes)
        ]
        for process in started:
            process.start()
        multiprocessing.connection.wait([process.sentinel for process in started], 120)
        first = time.monotonic()
        for process in started:
            process.join(max(0.0, first + 30 - time.monotonic()))
        seconds = time.monotonic() - first
        statuses = [process.exitcode for process in started]
        for process in started:
            process.kill()
        return Ended(statuses, [(Path(folder) / f"stderr{rank}").read_text() for rank in range(processes)], seconds)


def _main(
    rank: int, world_size: int, port: int, folder: str, arguments: list[str], change: Callable[[], None] | None
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}{rank}", os.O_CREAT | os.O_WRONLY), number)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    torch.set_num_threads(1)
    if change is not None:
        change()
    sys.exit(train.main(read_command_line("train.py", [*TINY, *arguments], rank, world_size)))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
