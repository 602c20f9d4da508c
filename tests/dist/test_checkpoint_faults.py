"""Saves while the run goes on, when the disk is full, and when the process is killed at any moment."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed

from dist import agree, checkpoint, restore, shard_files
from dist.checkpoint import Checkpointer
from dist.step_folder import step_folders
from tests.dist.processes import run_to_exit
from tests.dist.states import Warnings, attempt, build, differing, local
from tests.spawn import run_ranks


def slow_disk(seconds: float) -> None:
    """Let every write of this process take longer."""
    write = shard_files._HashingStream.write

    def slow_write(stream, data):
        time.sleep(seconds)
        return write(stream, data)

    shard_files._HashingStream.write = slow_write


def train_while_saving(rank: int, world_size: int, folder: str) -> dict:
    """Save in the background on a slow disk, and change every tensor and use the default group meanwhile."""
    slow_disk(0.005)
    saver = Checkpointer(Path(folder), 0, True)
    state = build("fsdp")
    blocked = saver.save(5, state, {"samples": 5})
    steps_meanwhile = 0
    while all(agree.gather(saver.steps() == [])):
        for tensor in state.values():
            local(tensor).add_(1)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total.item() == world_size
        steps_meanwhile += 1
    saver.wait()
    loaded = build("fsdp", fill=9)
    saver.load(5, loaded)
    saved = build("fsdp")
    changed = differing(state, saved)
    return {
        "wrong": differing(loaded, saved),
        "steps": steps_meanwhile,
        "blocked": blocked,
        "unchanged": [name for name in state if name not in changed and local(state[name]).numel()],
    }


def test_a_background_save_holds_the_values_of_its_step_while_training_goes_on(tmp_path: Path):
    for outcome in run_ranks(2, train_while_saving, str(tmp_path)):
        assert outcome["wrong"] == [] and outcome["unchanged"] == []
        assert outcome["steps"] > 3, "training ran while the save was written"


def save_twice_at_once(rank: int, world_size: int, folder: str) -> list:
    slow_disk(0.003)
    saver = Checkpointer(Path(folder), 0, True)
    first = saver.save(1, build("fsdp", fill=1), {})
    second = saver.save(2, build("fsdp", fill=2), {})
    state = build("fsdp", fill=9)
    saver.load(2, state)
    return [saver.steps(), differing(state, build("fsdp", fill=2)), second > first]


def test_a_second_save_waits_for_the_first_and_load_for_both(tmp_path: Path):
    assert run_ranks(2, save_twice_at_once, str(tmp_path)) == [[[1, 2], [], True]] * 2


def keep_and_count(rank: int, world_size: int, folder: str, keep: int) -> tuple[list[int], list[str]]:
    saver = Checkpointer(Path(folder), keep, True)
    for step in (9, 10, 900, 1000):
        saver.save(step, {"a": torch.tensor(step)}, {})
    saver.close()
    return saver.steps(), sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(("keep", "kept"), [(2, [900, 1000]), (1, [1000]), (0, [9, 10, 900, 1000])])
def test_retention_counts_numbers_and_leaves_strays(keep: int, kept: list[int], tmp_path: Path):
    strays = ["notes", "step-abc", "step-00000950.superseded", "step-1e3"]
    for stray in [*strays, "step-00000007.tmp"]:
        (tmp_path / stray).mkdir()
    files = ["step-00005000", "step-00000008.tmp", "step-00000008.old"]
    for name in files:
        (tmp_path / name).write_text("a file, not a checkpoint")
    (steps, names), _ = run_ranks(2, keep_and_count, str(tmp_path), keep)
    assert steps == kept
    # what a dead run left half-written is gone; nothing else is
    assert names == sorted([*strays, *files, *(f"step-{step:08d}" for step in kept)])


def go_back(rank: int, world_size: int, folder: str) -> dict:
    """Steps 5 to 20; back to 10 on purpose; then 12."""
    saver = Checkpointer(Path(folder), 2, False)
    warnings = Warnings()
    for step in (5, 10, 15, 20):
        saver.save(step, {"a": torch.tensor(step)}, {})
    saver = Checkpointer(Path(folder), 2, False)
    assert saver.find("15") == 15
    saver.save(17, {"a": torch.tensor(17)}, {})
    return {"steps": saver.steps(), "auto": saver.find("auto"), "warnings": warnings.messages}


def test_going_back_sets_the_later_checkpoints_aside(tmp_path: Path):
    outcome = run_ranks(2, go_back, str(tmp_path))[0]
    assert outcome["steps"] == [15, 17] and outcome["auto"] == 17
    assert "step-00000020 is now step-00000020.superseded" in outcome["warnings"][0]
    assert (tmp_path / "step-00000020.superseded" / "manifest.json").is_file()


def fill_disk(rank: int, world_size: int, folder: str, async_save: bool, limit: int | None) -> dict:
    """A small save, one that does not fit, a small one again. ``limit`` caps the size of this rank's files."""
    saver = Checkpointer(Path(folder), 0, async_save)
    small = {f"a{rank}": torch.full((1000,), 1.0)}
    saver.save(1, small, {})
    saver.wait()
    if limit and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    error = None
    try:
        saver.save(2, {f"a{rank}": torch.full((250_000,), 2.0)}, {})
        saver.wait()
    except agree.AgreedError as caught:
        error = caught.user, caught.errno, str(caught)
    torch.distributed.barrier()
    names = sorted(path.name for path in Path(folder).iterdir())
    saver.save(3, small, {})
    saver.close()
    return {"error": error, "names": names, "steps": saver.steps(), "found": saver.find("auto")}


@pytest.mark.parametrize("async_save", [True, False])
def test_a_disk_that_fills_up_on_one_rank_is_one_clear_error_on_all(async_save: bool, tmp_path: Path):
    # the other rank's file fits: rank 1 alone meets its limit of file size
    first, second = run_ranks(2, fill_disk, str(tmp_path), async_save, 100_000)
    assert first == second
    user, number, message = first["error"]
    assert user and number == errno.EFBIG and "__1_0.distcp" in message and "lower checkpoint.keep" in message
    assert first["names"] == ["step-00000001"], "the partial folder is removed, the previous checkpoint is there"
    assert first["steps"] == [1, 3] and first["found"] == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here; the limit of file size covers a write that fails")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill_disk_unforeseen(rank: int, world_size: int, folder: str) -> dict:
    # as if another program took the space after the estimate
    checkpoint._refuse_full_disk = lambda *args: None
    return fill_disk(rank, world_size, folder, True, None)


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_file_system(foreseen: bool, small_disk: Path):
    folder = small_disk / "checkpoints"
    if foreseen:
        first, second = run_ranks(2, fill_disk, str(folder), True, None)
    else:
        first, second = run_ranks(2, fill_disk_unforeseen, str(folder))
    assert first == second
    user, number, message = first["error"]
    assert user and number == errno.ENOSPC and ("step 2 needs about" in message) == foreseen, message
    assert first["names"] == ["step-00000001"] and first["steps"] == [1, 3] and first["found"] == 3


def fail_in_background(rank: int, world_size: int, folder: str) -> list:
    """One rank's background write fails; the error must come out at the next save or at wait, on both."""
    saver = Checkpointer(Path(folder), 0, True)
    write = shard_files._HashingStream.write
    outcomes = []
    for step, next_call in ((1, lambda: saver.save(10, build("fsdp"), {})), (2, saver.wait), (3, saver.close)):
        if rank == 1:
            shard_files._HashingStream.write = lambda stream, data: 1 / 0
        saver.save(step, build("fsdp"), {})
        while saver._writing.is_alive():
            time.sleep(0.01)
        torch.distributed.barrier()
        shard_files._HashingStream.write = write
        outcomes.append(attempt(next_call))
        saver.wait()
    saver.save(4, build("fsdp"), {})
    saver.close()
    return [outcomes, sorted(path.name for path in Path(folder).iterdir())]


def test_a_failed_background_save_comes_out_on_all_ranks_at_the_next_call(tmp_path: Path):
    first, second = run_ranks(2, fail_in_background, str(tmp_path))
    assert first == second
    outcomes, names = first
    assert [kind for kind, _ in outcomes] == ["AgreedError"] * 3
    assert all("failed on rank 1: ZeroDivisionError" in message for _, message in outcomes)
    assert names == ["step-00000004"], "nothing is left of the failed ones, and the saver still works"


def die_at(count: int) -> None:
    """Kill this process at its ``count``-th act on the folder: a rename, a removal, or a file forced to disk."""
    acts = 0

    def deadly(act: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            nonlocal acts
            acts += 1
            if acts == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*args, **kwargs)

        return wrapped

    for owner, name in ((Path, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "mkdir")):
        setattr(owner, name, deadly(getattr(owner, name)))


def replace_and_retire(rank: int, world_size: int, folder: str, count: int) -> None:
    """With 5, 10 and an abandoned 20 there: save 10 again, then 15, keeping two; die at one act of all that."""
    saver = Checkpointer(Path(folder), 2, False)
    die_at(count)
    saver.save(10, build("fsdp", fill=10), {"fill": 10})
    saver.save(15, build("fsdp", fill=15), {"fill": 15})


def prepare_steps(rank: int, world_size: int, folder: str) -> None:
    saver = Checkpointer(Path(folder), 0, False)
    for step in (5, 10, 20):
        saver.save(step, build("fsdp", fill=step), {"fill": step})


def load_newest(rank: int, world_size: int, folders: list[str]) -> list[int]:
    """For each folder: the step that is resumed, checked in every value, after which a save must work again."""
    steps = []
    for folder in folders:
        saver = Checkpointer(Path(folder), 2, False)
        step = saver.find("auto")
        assert step is not None and saver.read_meta(step) == {"fill": step}, (folder, step)
        damaged = [other for other in saver.steps() if restore.verify(step_folders(Path(folder))[other], other)]
        assert damaged == [], (folder, damaged)
        state = build("fsdp", fill=99)
        saver.load(step, state)
        assert differing(state, build("fsdp", fill=step)) == [], (folder, step)
        saver.save(step + 1, state, {"fill": step + 1})
        assert saver.find("auto") == step + 1
        left = [path.name for path in Path(folder).iterdir() if path.suffix in (".tmp", ".old")]
        assert left == [], (folder, left)
        steps.append(step)
    return steps


def test_a_kill_at_any_act_of_a_save_leaves_a_checkpoint_that_loads(tmp_path: Path):
    run_ranks(1, prepare_steps, str(tmp_path / "before"))
    folders = []
    for count in range(1, 200):
        folders.append(str(tmp_path / str(count)))
        shutil.copytree(tmp_path / "before", folders[-1])
        statuses, _ = run_to_exit(1, replace_and_retire, folders[-1], count)
        if statuses == [0]:
            break
        assert statuses == [-signal.SIGKILL]
    assert count > 20, "the acts of two saves"
    steps = run_ranks(1, load_newest, folders)[0]
    # the abandoned 20 first, then 10 as it was or as it is, at last 15: never further back, never nothing
    assert steps == sorted(steps, key=[20, 10, 15].index) and set(steps) == {10, 15, 20}


def save_forever(rank: int, world_size: int, folder: str) -> None:
    slow_disk(0.001)
    saver = Checkpointer(Path(folder), 2, True)
    try:
        for step in range(1, 100_000):
            saver.save(step, build("fsdp", fill=step % 200), {"fill": step})
    except (RuntimeError, agree.AgreedError):
        sys.exit(1)


def load_after_kill(rank: int, world_size: int, folders: list[str]) -> list[int]:
    steps = []
    for folder in folders:
        saver = Checkpointer(Path(folder), 2, False)
        step = saver.find("auto")
        state = build("fsdp", fill=0)
        saver.load(step, state)
        assert differing(state, build("fsdp", fill=step % 200)) == [], (folder, step)
        steps.append(step)
    return steps


def test_kills_at_random_moments_of_background_saves(tmp_path: Path):
    moments = random.Random(0)
    folders = []
    for number in range(6):
        folders.append(str(tmp_path / str(number)))
        # all ranks at once (power), or one of them: the others must end by themselves
        victim = (-1, 0, 1)[number % 3]
        second = Path(folders[-1]) / "step-00000002"
        delay = moments.uniform(0, 0.3)
        statuses, seconds = run_to_exit(
            2, save_forever, folders[-1], kill=victim, ready=second.exists, kill_after_seconds=delay
        )
        assert 0 not in statuses and seconds < 15
    steps = run_ranks(3, load_after_kill, folders)
    assert steps[0] == steps[1] == steps[2]
    assert all(step >= 2 for step in steps[0]), steps[0]
