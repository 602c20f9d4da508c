"""One folder for all ranks, one configuration in it, and nothing of another run mixed in."""

import json
import multiprocessing
import os
import re
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
import yaml

from conf.compose import to_yaml as resolved
from conf.optimizers import AdamWConfig, SGDConfig
from conf.schema import Config, ModelConfig, RunConfig, TrainConfig
from dist import run_folder
from tests.dist.states import Warnings, attempt
from tests.spawn import run_ranks


def settings(run_dir: Path | str | None = None, **sections) -> Config:
    sections = {"optimizer": AdamWConfig(), **sections}
    return Config(run=RunConfig(dir=run_dir and str(run_dir)), microbatch=4, **sections)


def start(rank: int, world_size: int, config: Config, cwd: str, late: float = 0.0):
    """The folder that this rank ends up with, or the error, and the warnings."""
    os.chdir(cwd)
    time.sleep(late if rank == 1 else 0)
    warnings = Warnings()
    folder = attempt(lambda: run_folder.agree_run_folder(config, resolved(config)))
    return folder, warnings.messages


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_late_rank_gets_the_same_default_folder_and_there_is_one_configuration(tmp_path: Path):
    config = Config(run=RunConfig(name="my run=1"), microbatch=4)
    folders = [folder for folder, _ in run_ranks(2, start, config, str(tmp_path), 1.2)]
    assert folders[0] == folders[1] and folders[0].is_absolute()
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [folders[0].name]
    assert folders[0].name.endswith("-my-run-1"), "no spaces and no equal signs in names of ours"
    assert (folders[0] / "config.yaml").read_text() == resolved(config)
    assert [event["kind"] for event in events(folders[0])] == ["start"]


def start_twice(rank: int, world_size: int, config: Config, cwd: str) -> list[Path]:
    os.chdir(cwd)

    class FixedTime(run_folder.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    run_folder.datetime = FixedTime
    return [run_folder.agree_run_folder(config, resolved(config)) for _ in range(3)]


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path):
    first, second = run_ranks(2, start_twice, settings(), str(tmp_path))
    assert first == second
    assert [folder.name for folder in first] == [
        "20260102-030405-run",
        "20260102-030405-run-2",
        "20260102-030405-run-3",
    ]


def start_and_stay(rank: int, world_size: int, config: Config, cwd: str, started: Any, leave: Any) -> None:
    start(rank, world_size, config, cwd)
    started.set()
    leave.wait(60)


def test_a_folder_in_use_is_refused_until_its_process_is_gone(tmp_path: Path):
    config = settings("a")
    context = multiprocessing.get_context("fork")
    started, leave = context.Event(), context.Event()
    first = threading.Thread(target=run_ranks, args=(1, start_and_stay, config, str(tmp_path), started, leave))
    first.start()
    assert started.wait(60)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    other = settings("a", train=TrainConfig(seed=1))
    for second in (config, other):
        error = run_ranks(1, start, second, str(tmp_path))[0][0]
        assert re.search(r"run\.dir=.* is in use by process \d+ on .*set another run\.dir", str(error))
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    leave.set()
    first.join()
    assert run_ranks(1, start, config, str(tmp_path))[0] == (tmp_path / "a", [])


def test_the_same_command_again_joins_its_folder(tmp_path: Path):
    config = settings("runs/a")
    run_ranks(2, start, config, str(tmp_path))
    folder, warnings = run_ranks(1, start, config, str(tmp_path))[0]
    assert folder == tmp_path / "runs" / "a" and warnings == []
    # the folder spelt in another way is the same folder
    absolute = settings(tmp_path / "runs" / "a")
    assert run_ranks(1, start, absolute, str(tmp_path))[0] == (folder, [])
    assert [event["changed"] for event in events(folder)] == [{}, {}, {}]


def test_a_change_that_is_allowed_wins_and_is_recorded_and_the_first_configuration_stays(tmp_path: Path):
    first = settings(tmp_path / "a", train=TrainConfig(steps=100), optimizer=AdamWConfig(lr=0.001))
    second = settings(tmp_path / "a", train=TrainConfig(steps=200), optimizer=AdamWConfig(lr=0.0005))
    second.model.microbatch = 2
    run_ranks(2, start, first, str(tmp_path))
    (folder, warnings), (_, others) = run_ranks(2, start, second, str(tmp_path))
    assert folder == tmp_path / "a" and others == []
    assert len(warnings) == 3
    assert "train.steps was 100 when this run began and is now 200; the new value is used" in warnings
    assert events(folder)[1]["changed"] == {
        "model.microbatch": [8, 2],
        "optimizer.lr": [0.001, 0.0005],
        "train.steps": [100, 200],
    }
    assert (folder / "config.yaml").read_text() == resolved(first)


# section that another run has -> key and both values in the refusal
FOREIGN = {
    "model": (ModelConfig(dim=32), "model.dim: 256 and 32"),
    "optimizer": (SGDConfig(), "optimizer.name: adamw and sgd"),
    "train": (TrainConfig(seq_len=128, seed=3), "train.seed: 0 and 3; train.seq_len: 256 and 128"),
}


@pytest.mark.parametrize("section", FOREIGN)
def test_another_run_in_the_folder_is_refused_with_each_key_and_both_values(section: str, tmp_path: Path):
    value, words = FOREIGN[section]
    run_ranks(1, start, settings(tmp_path / "a"), str(tmp_path))
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    outcomes = run_ranks(2, start, settings(tmp_path / "a", **{section: value}), str(tmp_path))
    kind, message = outcomes[0][0]
    assert outcomes[0][0] == outcomes[1][0] and kind == "AgreedConfigError"
    assert words in message and "another run.dir" in message and "restore these values" in message
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before, "nothing was touched"


def test_a_key_that_an_older_program_did_not_have_is_a_change_and_no_refusal(tmp_path: Path):
    config = settings(tmp_path / "a")
    run_ranks(1, start, config, str(tmp_path))
    old = asdict(config)
    del old["model"]["tied"]
    (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump(old))
    folder, warnings = run_ranks(1, start, config, str(tmp_path))[0]
    assert folder == tmp_path / "a" and warnings[0].startswith("model.tied was (not there)")


def start_differently(rank: int, world_size: int, cwd: str):
    config = settings(Path(cwd) / "a", train=TrainConfig(seed=rank // 2))
    return attempt(lambda: run_folder.agree_run_folder(config, resolved(config)))


def test_ranks_that_were_configured_differently_stop_before_a_folder_is_made(tmp_path: Path):
    outcomes = run_ranks(3, start_differently, str(tmp_path))
    assert outcomes == [outcomes[0]] * 3 and outcomes[0][0] == "AgreedConfigError"
    assert "rank 2 was started with another configuration than rank 0" in outcomes[0][1]
    assert "train.seed: 0 and 1" in outcomes[0][1] and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_clear_error_on_all_ranks(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    for run_dir, words in (
        (tmp_path / "file" / "run", "Not a directory"),
        (tmp_path / "file", "File exists"),
        ("/proc/gossamer", "No such file or directory"),
    ):
        outcomes = run_ranks(2, start, settings(run_dir), str(tmp_path))
        kind, message = outcomes[0][0]
        assert outcomes[0] == outcomes[1] and kind == "AgreedConfigError"
        assert f"run.dir={run_dir}" in message and words in message and "Set run.dir to a folder" in message
    assert (tmp_path / "file").read_text() == "in the way"


def start_without_space(rank: int, world_size: int, config: Config):
    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    os.fsync = no_space
    return attempt(lambda: run_folder.agree_run_folder(config, resolved(config)))


def test_a_full_disk_at_the_start(tmp_path: Path):
    outcomes = run_ranks(2, start_without_space, settings(tmp_path / "a"))
    assert outcomes[0] == outcomes[1] and "No space left on device" in outcomes[0][1]
    assert not (tmp_path / "a" / "config.yaml").exists()


def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path):
    (tmp_path / "a").mkdir()
    for content in (b"model: [1, 2", b"\xff\xfe\x00bad", b"just a sentence", b""):
        (tmp_path / "a" / "config.yaml").write_bytes(content)
        kind, message = run_ranks(1, start, settings(tmp_path / "a"), str(tmp_path))[0][0]
        assert kind == "AgreedConfigError" and "config.yaml" in message, content


def test_status_is_replaced_whole(tmp_path: Path):
    run_folder.write_status(tmp_path, "running", step=1)
    run_folder.write_status(tmp_path, "failed", step=7, loss=float("nan"), error="x")
    status = json.loads((tmp_path / "status.json").read_text(), parse_constant=pytest.fail)
    assert status.pop("time") and status == {"outcome": "failed", "step": 7, "loss": "nan", "error": "x"}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    with pytest.raises(AssertionError):
        run_folder.write_status(tmp_path, "fine")


def record(rank: int, world_size: int, folder: str) -> None:
    run_folder.append_event(Path(folder), "skip", step=rank)
    torch.distributed.barrier()
    if rank == 0:
        # a kill in the middle of a line
        with (Path(folder) / "events.jsonl").open("a") as stream:
            stream.write('{"kind": "res')
    torch.distributed.barrier()
    run_folder.append_event(Path(folder), "resume", step=3)


def test_events_are_appended_by_rank_0_and_survive_a_cut_line(tmp_path: Path):
    run_ranks(2, record, str(tmp_path))
    first, cut, last = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(first)["step"] == 0 and json.loads(last)["kind"] == "resume" and cut == '{"kind": "res'
