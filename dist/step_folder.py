"""The life of a checkpoint's folder: written under another name, complete, replaced, set aside, removed.

Decided here: the names (``step-00000500``; ``.tmp`` while it is written or removed, ``.old`` while it is replaced,
``.superseded`` when the run has gone back behind it) and the order of renames, such that a kill between any two of
them leaves a checkpoint that can be loaded. A folder is complete when it has the name and a manifest. Whatever else
lies there is left alone. Everything here runs on one rank.
"""

import logging
import re
import shutil
from pathlib import Path

from dist.manifest import MANIFEST_NAME, FileEntry, Manifest, sync_folder, write_manifest

logger = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"step-(\d+)")
_PARTIAL_NAME = re.compile(r"step-\d+\.tmp")
_REPLACED_NAME = re.compile(r"step-\d+\.old")


def step_name(step: int) -> str:
    """Folder name of ``step``."""
    return f"step-{step:08d}"


def step_folders(folder: Path) -> dict[int, Path]:
    """Step -> folder, ascending, of everything in ``folder`` named like a finished checkpoint, complete or not.

    Of two names for one step (``step-10``, ``step-00000010``) the one that ``step_name`` gives counts.
    """
    if not folder.is_dir():
        return {}
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = _STEP_NAME.fullmatch(path.name)
        if match and path.is_dir():
            step = int(match.group(1))
            if step not in found or path.name == step_name(step):
                found[step] = path
    return dict(sorted(found.items()))


def is_complete(path: Path) -> bool:
    """Whether the folder was finished: it has a manifest."""
    return (path / MANIFEST_NAME).is_file()


def open_partial(partial: Path) -> None:
    """Make the empty folder ``partial`` and remove what dead runs left of theirs; one run at a time uses the parent."""
    folder = partial.parent
    folder.mkdir(parents=True, exist_ok=True)
    finish_replacements(folder)
    for path in folder.iterdir():
        if _PARTIAL_NAME.fullmatch(path.name) and path.is_dir():
            shutil.rmtree(path)
    partial.mkdir()


def finish_replacements(folder: Path) -> None:
    """Undo a replacement of a checkpoint that was killed between its two renames, or finish one after them."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _REPLACED_NAME.fullmatch(path.name) and path.is_dir():
            final = path.with_suffix("")
            if final.exists():
                shutil.rmtree(path)
            else:
                path.rename(final)


def complete(manifest: Manifest, partial: Path, target: Path, keep: int) -> None:
    """Give ``partial`` its manifest and the name ``target``, then remove all but the newest ``keep`` (0: none).

    Raises:
        OSError: a file is not there in full, or the disk is full; nothing has the name ``target`` then that had not.
    """
    for name, entry in manifest.files.items():
        _refuse_unseen(partial / name, entry)
    write_manifest(partial, manifest)
    folder = target.parent
    # before the rename: a kill in between must not let the abandoned later checkpoints win over this one
    _set_aside_after(folder, manifest.step)
    replaced = target.with_name(target.name + ".old")
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    sync_folder(folder)
    try:
        shutil.rmtree(replaced, ignore_errors=True)
        _retire(folder, keep)
    except OSError as error:
        # the new checkpoint is good; that an old one could not be removed must not end the run
        logger.warning("old checkpoints in %s could not be removed: %s", folder, error)


def _refuse_unseen(path: Path, entry: FileEntry) -> None:
    if not path.is_file() or path.stat().st_size != entry.size:
        raise OSError(
            f"{path} was written by another rank but is not visible on rank 0 in full: run.dir must lie on a file "
            "system that all nodes share."
        )


def _set_aside_after(folder: Path, step: int) -> None:
    """Rename complete checkpoints later than ``step``: the run has gone back and left them behind."""
    for later, path in step_folders(folder).items():
        if later > step and is_complete(path):
            aside = path.with_name(path.name + ".superseded")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            logger.warning("step %d is saved after going back: the later %s is now %s", step, path.name, aside.name)


def _retire(folder: Path, keep: int) -> None:
    if keep == 0:
        return
    finished = [path for path in step_folders(folder).values() if is_complete(path)]
    for path in finished[:-keep]:
        # first the name, so that a kill in the middle does not leave half a checkpoint that looks whole
        doomed = path.with_name(path.name + ".tmp")
        path.rename(doomed)
        shutil.rmtree(doomed)
