"""How a run is saved, so that a kill at any moment leaves a checkpoint that can be loaded.

Decided here: a checkpoint is written into ``step-N.tmp`` and exists once that folder is renamed; an asynchronous save
works on a private copy of the tensors, in a thread, on a process group of its own; older checkpoints go only when the
newer one is durable. Names and renames are in ``dist.step_folder``, sizes and checksums in
``dist.manifest``, who writes what in ``dist.chunks``, file content in ``dist.shard_files``, choosing and loading in
``dist.restore``.
"""

import errno
import json
import platform
import shutil
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from dist import agree, chunks, restore, step_folder
from dist.manifest import Manifest, TensorEntry, read_manifest
from dist.shard_files import ChunkPlanner, HashingWriter

# what torch's file format adds to each chunk at most (zip headers, alignment), and to the index
CHUNK_OVERHEAD_BYTES = 4096
SPACE_FIX = "Free space, lower checkpoint.keep, or set run.dir on another disk."
# a slow file system may hold one rank back for long; a dead rank is noticed at once all the same
WRITE_TIMEOUT = timedelta(hours=1)


class Checkpointer:
    """Saves to and loads from one folder of checkpoints, with all ranks.

    Every public method except ``steps`` is collective: all ranks call it, in the same order, from their main thread.
    Failures are ``AgreedError`` on every rank, or ``ConfigError`` where a setting mends them.
    """

    def __init__(self, folder: Path, keep: int = 0, async_save: bool = True) -> None:
        """``folder`` is made at the first save; ``keep`` newest complete checkpoints stay (0: all)."""
        assert keep >= 0, keep
        self.folder = folder
        self._keep = keep
        self._async_save = async_save
        # a background save must not share a group with the training thread: their collectives would be mixed up
        self._group = torch.distributed.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._assignment = chunks.Assignment()
        self._copies: dict[str, torch.Tensor] = {}

    def reserve(self, tensors: dict[str, torch.Tensor]) -> None:
        """Prepare for saves of ``tensors``: without it the first asynchronous save stalls for these things.

        Who writes what is settled now; the memory for the copy is taken in the background, since the first touch of
        fresh pages takes several times as long as the copy. Raises as ``save``.
        """
        if not self._async_save:
            return
        what = f"preparing saves to {self.folder}"
        proposal = agree.together(lambda: chunks.Proposal(tensors, {}), what)
        owned = chunks.owned_chunks(tensors, self._assignment.update(proposal, what)[1])
        self._writing = threading.Thread(target=self._reserve, args=(owned,), name="reserve", daemon=True)
        self._writing.start()

    def save(self, step: int, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> float:
        """Save ``tensors`` and ``meta`` as the checkpoint of ``step``; returns the seconds that the call blocked.

        ``tensors`` maps canonical names to DTensors or plain tensors of any dtype and device; a plain tensor's name
        is either on several ranks with equal values or on one rank alone. ``meta`` holds plain JSON values, equal
        on all ranks. With ``async_save`` the tensors may be changed as soon as this returns: the rest happens in the
        background, and its failure is raised by the next ``save``, ``wait`` or ``close``. A previous save that is
        still running is waited for.

        Raises:
            ValueError: (as AgreedError) values differ between ranks, meta is not plain.
            OSError: (as AgreedError, with ``errno``) the disk is full or will be; the partial folder is removed.
        """
        started = time.perf_counter()
        self.wait()
        what = f"saving step {step} to {self.folder}"
        proposal = agree.together(lambda: chunks.Proposal(tensors, meta), what)
        entries, owners = self._assignment.update(proposal, what)
        agree.on_first(lambda: _refuse_full_disk(self.folder, step, entries), what)
        owned = chunks.owned_chunks(tensors, owners)
        manifest = Manifest(
            step=step,
            world_size=torch.distributed.get_world_size(),
            files={},
            tensors=entries,
            meta=json.loads(proposal.meta_text),
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )
        if not self._async_save:
            self._write(manifest, owned)
            return time.perf_counter() - started
        owned = agree.together(lambda: self._copy(owned), what)
        self._writing = threading.Thread(
            target=self._write_in_background, args=(manifest, owned), name=f"save-{step}", daemon=True
        )
        self._writing.start()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Wait for the save that is running, if any; raises its failure, on all ranks."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Finish the save that is running and drop the copies; call it before the process group is destroyed."""
        try:
            self.wait()
        finally:
            self._copies.clear()

    def steps(self) -> list[int]:
        """Complete checkpoints, ascending by number. Local; says nothing about damage."""
        return [step for step, path in step_folder.step_folders(self.folder).items() if step_folder.is_complete(path)]

    def find(self, resume: str) -> int | None:
        """The step to resume for ``checkpoint.resume``, verified, the same on all ranks; None for a fresh start.

        ``auto``: the newest checkpoint whose files are as its manifest says; one that is not is passed over with a
        warning that says why. ``none``: refuses a folder with checkpoints. A number: that step.

        Raises:
            ConfigError: the step is absent or damaged; ``none`` and there is one; ``auto`` and all are damaged.
        """
        agree.on_first(lambda: step_folder.finish_replacements(self.folder), f"looking into {self.folder}")
        return restore.find_step(self.folder, resume)

    def read_manifest(self, step: int) -> Manifest:
        """The manifest of ``step``: tensor index, world size, versions and meta."""
        return agree.on_first(lambda: read_manifest(self._path(step)), f"reading the checkpoint of step {step}")

    def read_meta(self, step: int) -> dict[str, Any]:
        """The plain values that were saved with ``step``."""
        return self.read_manifest(step).meta

    def load(self, step: int, tensors: dict[str, torch.Tensor], skip: Sequence[str] = ()) -> None:
        """Fill ``tensors`` in place from ``step``, bit for bit, whatever the layout and world size of the save were.

        Before anything is changed, names, global shapes and dtypes are compared with the checkpoint; saved names
        that no rank passes are an error unless a shell pattern in ``skip`` matches them.

        Raises:
            ConfigError: (as AgreedConfigError) the checkpoint does not fit; every misfit is named.
        """
        self.wait()
        restore.load_tensors(self._path(step), self.read_manifest(step), tensors, skip)

    def _path(self, step: int) -> Path:
        return step_folder.step_folders(self.folder).get(step, self.folder / step_folder.step_name(step))

    def _reserve(self, owned: dict[str, chunks.Chunk]) -> None:
        try:
            self._copies = {name: _host_copy(values).zero_() for name, (_, _, values) in owned.items()}
        except (RuntimeError, MemoryError):
            # the save tries again, and says so on all ranks if there is still no room
            self._copies = {}

    def _copy(self, owned: dict[str, chunks.Chunk]) -> dict[str, chunks.Chunk]:
        """Private copies in host memory. Buffers are kept between saves: fresh pages cost five times the copy."""
        copies, devices = {}, set()
        for name, (place, shape, values) in owned.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                copy = _host_copy(values)
            copies[name] = copy.copy_(values, non_blocking=values.is_cuda)
            devices.add(values.device)
            owned[name] = (place, shape, copy)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._copies = copies
        return owned

    def _write_in_background(self, manifest: Manifest, owned: dict[str, chunks.Chunk]) -> None:
        try:
            self._write(manifest, owned)
        except Exception as error:
            self._failure = error

    def _write(self, manifest: Manifest, owned: dict[str, chunks.Chunk]) -> None:
        """Write, complete and rename one checkpoint, or leave nothing of it; collective on the own group."""
        target = self.folder / step_folder.step_name(manifest.step)
        partial = target.with_name(target.name + ".tmp")
        what = f"writing {target}"
        try:
            agree.on_first(lambda: step_folder.open_partial(partial), what, self._group)
            writer = HashingWriter(partial)
            try:
                save({}, storage_writer=writer, planner=ChunkPlanner(owned), process_group=self._group)
            except CheckpointException as error:
                raise restore.first_cause(error, what) from None
            for entries in agree.gather(writer.entries, self._group):
                manifest.files.update(entries)
            agree.on_first(lambda: step_folder.complete(manifest, partial, target, self._keep), what, self._group)
        except Exception as error:
            # every rank is past its writing here: failures were exchanged before they were raised
            if torch.distributed.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, agree.AgreedError):
                raise _explain(error, manifest.step, self.folder) from error
            raise


def _host_copy(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)


def _refuse_full_disk(folder: Path, step: int, entries: dict[str, TensorEntry]) -> None:
    needed = sum(
        entry.num_bytes + CHUNK_OVERHEAD_BYTES * torch.distributed.get_world_size() for entry in entries.values()
    )
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"step {step} needs about {needed / 2**20:.1f} MiB, {folder} has {free / 2**20:.1f} MiB free. {SPACE_FIX}",
        )


def _explain(error: agree.AgreedError, step: int, folder: Path) -> agree.AgreedError:
    """``error`` of a save with what it means for the user; only what the disk says has a fix to add."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    message = f"step {step} could not be written to {folder}: {error}. Earlier checkpoints are untouched. {SPACE_FIX}"
    return agree.AgreedError(message, error.rank, error.kind, error.user, error.errno, error.trace)
