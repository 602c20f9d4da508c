"""Where a run keeps its files, and whether what is there belongs to it.

Decided here: rank 0 chooses the folder once for all ranks and keeps it from other runs while its process lives; the
first configuration written there stays; a start in a folder that exists is refused when the settings that make the run
what it is (``IDENTITY``) differ, and otherwise goes on with the new values, with every change on record. Also the two
small files that other programs read: ``status.json`` (how the run stands) and ``events.jsonl`` (decisions, one JSON
object a line).
"""

import errno
import fcntl
import fnmatch
import json
import logging
import math
import os
import re
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.checks import ConfigError
from conf.schema import Config
from dist import agree

logger = logging.getLogger(__name__)

DEFAULT_PARENT = "outputs"
CONFIG_NAME = "config.yaml"
STATUS_NAME = "status.json"
EVENTS_NAME = "events.jsonl"
LOCK_NAME = ".lock"
OUTCOMES = ("running", "done", "preempted", "failed", "oom")

# patterns of the settings that make a run what it is; the data's own identity is compared by content (data.loader)
IDENTITY = ("model.*", "optimizer.name", "train.seq_len", "train.seed")
# labels and measures of speed among them, free to change
NOT_IDENTITY = ("model.name", "model.microbatch")
# the folder as it was typed may be spelt differently at each start
NOT_COMPARED = ("run.dir",)
_ABSENT = "(not there)"
# folder -> its open lock file: closing it would let another run in
_held: dict[Path, int] = {}


def agree_run_folder(config: Config, resolved: str) -> Path:
    """The absolute path of the run's folder, made or joined by all ranks together; collective.

    ``resolved`` is the whole configuration as YAML (``conf.compose.to_yaml``). A new folder gets it as
    ``config.yaml``. In a folder that has one, differing identity settings are refused and other changes are logged
    and appended to ``events.jsonl``; the new values win. Without ``run.dir`` the folder is
    ``outputs/<date>-<time>-<name>``, one for each start.

    Raises:
        ConfigError: (as AgreedConfigError on every rank) the ranks were configured differently, the folder holds
            another run, a run that is still alive uses it, or it cannot be written to.
    """
    texts = agree.gather(resolved)
    agree.together(lambda: _refuse_different_ranks(texts), "comparing the configuration of the ranks")
    return agree.on_first(lambda: _open_folder(config, resolved), "opening the run folder")


def write_status(folder: Path, outcome: str, **fields: Any) -> None:
    """Replace ``status.json`` by ``outcome`` (one of ``OUTCOMES``) and ``fields``. Local: call it on one rank."""
    assert outcome in OUTCOMES, outcome
    write_whole(folder / STATUS_NAME, json.dumps(_json_values({"outcome": outcome, "time": _now(), **fields})) + "\n")


def append_event(folder: Path, kind: str, **fields: Any) -> None:
    """Append one object (``time``, ``kind``, ``fields``) to ``events.jsonl``. Does nothing on ranks other than 0."""
    if torch.distributed.get_rank() == 0:
        line = json.dumps(_json_values({"time": _now(), "kind": kind, **fields})) + "\n"
        with (folder / EVENTS_NAME).open("ab+") as stream:
            if stream.tell() > 0:
                stream.seek(-1, os.SEEK_END)
                # a kill in the middle of a line must not spoil this one too
                line = line if stream.read(1) == b"\n" else "\n" + line
            stream.write(line.encode())


def _refuse_different_ranks(texts: list[str]) -> None:
    first = _flatten_text(texts[0])
    for rank, text in enumerate(texts):
        if text != texts[0] and (differences := _differences(first, _flatten_text(text))):
            raise ConfigError(
                f"rank {rank} was started with another configuration than rank 0 (values of rank 0, then rank {rank}): "
                f"{_listed(differences)}. Start all ranks with the same command and files."
            )


def _open_folder(config: Config, resolved: str) -> Path:
    """Rank 0: make or join the folder."""
    wanted = config.run.dir or f"{DEFAULT_PARENT}/<date>-<time>-{config.run.name}"
    try:
        folder = _make_explicit(config.run.dir) if config.run.dir else _make_default(config.run.name)
        _hold(folder)
        if not (folder / CONFIG_NAME).exists():
            write_whole(folder / CONFIG_NAME, resolved)
            append_event(folder, "start", changed={})
            _sign(folder)
            return folder
        changed = _compare(folder, resolved)
        _sign(folder)
        append_event(folder, "start", changed={key: list(values) for key, values in changed.items()})
    except OSError as error:
        raise ConfigError(
            f"run.dir={wanted}: {error.strerror or error} ({error.filename or wanted}). Set run.dir to a folder that "
            "you may write to, on a disk with space."
        ) from error
    for key, (before, now) in changed.items():
        logger.warning("%s was %s when this run began and is now %s; the new value is used", key, before, now)
    return folder


def _make_explicit(path: str) -> Path:
    folder = Path(path).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _make_default(name: str) -> Path:
    """A folder that did not exist before, also when two runs start in the same second."""
    parent = Path(DEFAULT_PARENT).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    stem = f"{datetime.now().strftime('%Y%m%d-%H%M%S')}-{label}"
    for number in range(1, 10_000):
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise FileExistsError(17, "no free name for the run folder", str(parent / stem))


def _hold(folder: Path) -> None:
    """Keep other runs out of ``folder`` until this process ends, however it ends.

    A POSIX lock: the kernel drops it with the process, children do not inherit it, and NFS has it.
    """
    if folder in _held:
        return
    file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            owner = os.pread(file, 256, 0).decode(errors="replace") or "another process"
            os.close(file)
            raise ConfigError(
                f"run.dir={folder} is in use by {owner}: two runs in one folder would spoil each other's files. Wait "
                "for it or end it, or set another run.dir."
            ) from None
        logger.warning("%s cannot be locked (%s); start no second run in it", folder, error.strerror)
    _held[folder] = file


def _sign(folder: Path) -> None:
    """Say in the lock file who holds it, for the message of another start; only once the folder is ours."""
    os.ftruncate(_held[folder], 0)
    os.pwrite(_held[folder], f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _compare(folder: Path, resolved: str) -> dict[str, tuple[Any, Any]]:
    """Settings whose value differs from the folder's, key -> (then, now); refuses differing identity settings."""
    try:
        before = _flatten_text((folder / CONFIG_NAME).read_text())
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{folder / CONFIG_NAME} cannot be read ({error}). Set another run.dir.") from error
    now = _flatten_text(resolved)
    if not before.keys() & now.keys():
        raise ConfigError(f"{folder / CONFIG_NAME} is not the configuration of a run. Set another run.dir.")
    changed = _differences(before, now)
    changed = {key: values for key, values in changed.items() if not _matches(key, NOT_COMPARED)}
    # a key that only one version of the program knows says nothing about the run
    foreign = {
        key: values
        for key, values in changed.items()
        if _matches(key, IDENTITY) and not _matches(key, NOT_IDENTITY) and _ABSENT not in values
    }
    if foreign:
        raise ConfigError(
            f"run.dir={folder} holds a run with other settings (its value, then this one): {_listed(foreign)}. Set "
            "another run.dir for a new run, or restore these values to continue that one."
        )
    return changed


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted(before.keys() | now.keys())
    pairs = {key: (before.get(key, _ABSENT), now.get(key, _ABSENT)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _listed(differences: dict[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key}: {before} and {now}" for key, (before, now) in differences.items())


def _flatten_text(text: str) -> dict[str, Any]:
    return _flatten(OmegaConf.to_container(OmegaConf.create(text)))


def _flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists stay whole."""
    if not isinstance(values, dict):
        return {prefix: values}
    flat = {}
    for key, value in values.items():
        flat.update(_flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _json_values(value: Any) -> Any:
    """``value`` for JSON, which has no NaN and no infinity: these become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(item) for item in value]
    return value


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` so that a reader sees the old content or the new one, also after a crash."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        # a full disk does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
