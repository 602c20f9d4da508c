"""Which checkpoint is resumed, and how its tensors get into live ones.

Decided here: one step for all ranks, chosen after its files were checked against the manifest (each rank checks a
share of them); what to do about a damaged one; and that nothing live is touched unless names, shapes and dtypes all
fit, which torch does not check (it ignores extra names and casts dtypes in silence).
"""

import fnmatch
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from conf.checks import ConfigError
from dist import agree
from dist.chunks import dtype_name
from dist.manifest import DamagedError, Manifest, file_problem, read_manifest
from dist.shard_files import PlainReader
from dist.step_folder import is_complete, step_folders

logger = logging.getLogger(__name__)

# names listed in one message
SHOWN_NAMES = 8


def find_step(folder: Path, resume: str) -> int | None:
    """The step that ``checkpoint.resume`` means; None for a fresh start. Collective; see ``Checkpointer.find``."""
    folders = agree.on_first(lambda: step_folders(folder), f"listing {folder}")
    complete = agree.on_first(lambda: [step for step, path in folders.items() if is_complete(path)], "listing")
    if resume == "none":
        if complete:
            raise ConfigError(
                f"checkpoint.resume=none, but {folder} holds checkpoints (steps {_few(complete)}). Set "
                "checkpoint.resume=auto to continue that run, or another run.dir to start anew."
            )
        return None
    if resume != "auto":
        return _explicit_step(folder, folders, complete, int(resume))
    for step in sorted(folders, reverse=True):
        problems = verify(folders[step], step)
        if not problems:
            return step
        if torch.distributed.get_rank() == 0:
            logger.warning("checkpoint %s is not used: %s", folders[step], _few(problems, "; "))
    if folders:
        raise ConfigError(
            f"checkpoint.resume=auto, but none of the checkpoints in {folder} (steps {_few(list(folders))}) can be "
            "loaded; the warnings above say why. Remove them or set another run.dir to start anew."
        )
    return None


def verify(path: Path, step: int) -> list[str]:
    """What is wrong with the checkpoint folder ``path``; empty if nothing is. Collective, the ranks share the files."""
    problem, manifest = agree.on_first(lambda: _try_manifest(path, step), f"reading {path}")
    if manifest is None:
        return [str(problem)]
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    mine = [file_problem(path / name, manifest.files[name]) for name in by_size[rank::world_size]]
    return sorted({problem for problems in agree.gather(mine) for problem in problems if problem})


def load_tensors(path: Path, manifest: Manifest, tensors: dict[str, torch.Tensor], skip: Sequence[str]) -> None:
    """Fill ``tensors`` in place from the checkpoint folder ``path``; collective, see ``Checkpointer.load``."""
    names = set().union(*agree.gather(set(tensors)))
    agree.together(lambda: _refuse_misfit(path, manifest, tensors, names, skip), f"loading {path}")
    try:
        load(
            tensors,
            storage_reader=PlainReader(path),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=agree.control_group(),
        )
    except CheckpointException as error:
        raise first_cause(error, f"loading {path}") from None


def first_cause(error: CheckpointException, what: str) -> agree.AgreedError:
    """The error of the lowest failing rank, as every rank raises it."""
    rank = min(error.failures)
    return agree.agreed_error(error.failures[rank][0], what, rank)


def _explicit_step(folder: Path, folders: dict[int, Path], complete: list[int], step: int) -> int:
    known = f"complete steps: {_few(complete)}" if complete else "there is no complete one"
    if step not in folders:
        raise ConfigError(
            f"checkpoint.resume={step}, but {folder} has no such checkpoint ({known}). Set one of these, or auto."
        )
    if problems := verify(folders[step], step):
        raise ConfigError(
            f"checkpoint.resume={step}, but {folders[step]} is damaged: {_few(problems, '; ')}. Set "
            f"checkpoint.resume=auto, or another step ({known})."
        )
    return step


def _try_manifest(path: Path, step: int) -> tuple[str | None, Manifest | None]:
    try:
        manifest = read_manifest(path)
    except DamagedError as error:
        return str(error), None
    if manifest.step != step:
        return f"its manifest is of step {manifest.step}", None
    return None, manifest


def _refuse_misfit(
    path: Path, manifest: Manifest, tensors: dict[str, torch.Tensor], names: set[str], skip: Sequence[str]
) -> None:
    saved = manifest.tensors
    wrong = []
    if missing := sorted(set(tensors) - set(saved)):
        wrong.append(f"it lacks {_few(missing)}")
    unused = sorted(set(saved) - names)
    if extra := [name for name in unused if not any(fnmatch.fnmatchcase(name, pattern) for pattern in skip)]:
        wrong.append(f"it has {_few(extra)}, which this run does not have")
    for name in sorted(set(tensors) & set(saved)):
        tensor, entry = tensors[name], saved[name]
        if list(tensor.shape) != entry.shape:
            wrong.append(f"{name} has shape {entry.shape} there and {list(tensor.shape)} here")
        if dtype_name(tensor.dtype) != entry.dtype:
            wrong.append(f"{name} is {entry.dtype} there and {dtype_name(tensor.dtype)} here")
        if tensor.is_meta:
            wrong.append(f"{name} is on the meta device here and cannot be filled")
    if wrong:
        raise ConfigError(
            f"checkpoint {path} does not fit this run: {_few(wrong, '; ')}. Restore the model and optimizer settings "
            "it was made with, or set another run.dir to start anew."
        )


def _few(values: Sequence[object], separator: str = ", ") -> str:
    shown = separator.join(str(value) for value in values[:SHOWN_NAMES])
    return shown + (f" and {len(values) - SHOWN_NAMES} more" if len(values) > SHOWN_NAMES else "")
