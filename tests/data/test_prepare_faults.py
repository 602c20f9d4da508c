"""What interrupts ``data.prepare``: kills, dead workers, bad input, a full disk. A second start finishes the job."""

import dataclasses
import fcntl
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf.checks import ConfigError
from data import encode
from data import prepare as module
from data.folder import RECORD
from data.prepare import prepare
from tests.data.conftest import sentences
from tests.data.folders import content_of

ROOT = Path(__file__).parents[2]


def test_two_at_once_are_refused(prepared):
    config = dataclasses.replace(prepared, dir=f"{prepared.dir}2")
    os.makedirs(config.dir)
    with open(f"{config.dir}/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is preparing"):
            prepare(config)
    prepare(config)


def interrupt(monkeypatch, name: str, after: int):
    """Make the ``after``-th call of ``prepare``'s function ``name`` fail as a kill would: with nothing after it."""
    original, calls = getattr(module, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) == after:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, failing)


@pytest.mark.parametrize(
    ("name", "after"),
    [("_build_tokenizer", 1), ("encode_unit", 1), ("encode_unit", 4), ("_choose_held_out", 1), ("ShardWriter", 1),
     ("ShardWriter", 2), ("write_json", 1), ("_check_complete", 1)],
)  # fmt: skip
def test_an_interrupted_start_is_finished_with_the_same_bytes(name, after, prepared, small_units, monkeypatch):
    trained = dataclasses.replace(prepared, tokenizer=None, vocab_size=320, dir=f"{prepared.dir}-whole")
    prepare(trained)
    again = dataclasses.replace(trained, dir=f"{prepared.dir}-again")
    with monkeypatch.context() as patch:
        interrupt(patch, name, after)
        with pytest.raises(KeyboardInterrupt):
            prepare(again)
    assert (Path(again.dir) / RECORD).exists() == (name == "_check_complete")
    encoded = []
    original = module.encode_unit
    monkeypatch.setattr(
        module, "encode_unit", lambda unit, *args: (encoded.append(unit.index), original(unit, *args))[1]
    )
    prepare(again)
    assert content_of(again.dir) == content_of(trained.dir)
    if name == "encode_unit":
        assert encoded[0] == after - 1, "finished units are not done again"


def test_an_interrupted_start_leaves_room_for_other_settings_and_input(prepared, corpus, small_units, monkeypatch):
    # after an error the message says which setting to change: the folder must take it
    config = dataclasses.replace(prepared, dir=f"{prepared.dir}2")

    def stop(**changes):
        with monkeypatch.context() as patch:
            interrupt(patch, "_choose_held_out", 1)
            with pytest.raises(KeyboardInterrupt):
                prepare(dataclasses.replace(config, **changes))

    stop(add_bos=True)
    stop(tokenizer=None, vocab_size=310)
    (corpus / "a.txt").write_bytes((corpus / "a.txt").read_bytes()[::-1])
    stop()
    (corpus / "a.txt").write_text("other text of this file")
    prepare(config)
    whole = dataclasses.replace(config, dir=f"{prepared.dir}3")
    prepare(whole)
    assert content_of(config.dir) == content_of(whole.dir)


@pytest.mark.parametrize("damage", ["bin", "npz"])
def test_a_part_cut_by_a_crash_is_made_again(damage, prepared, small_units, monkeypatch):
    whole = dataclasses.replace(prepared, dir=f"{prepared.dir}-whole")
    prepare(whole)
    config = dataclasses.replace(prepared, dir=f"{prepared.dir}2")
    with monkeypatch.context() as patch:
        interrupt(patch, "_choose_held_out", 1)
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    (path,) = Path(config.dir).glob(f"parts-*/000001.{damage}")
    path.write_bytes(path.read_bytes()[:-7])
    prepare(config)
    assert content_of(config.dir) == content_of(whole.dir)


def run_command(*overrides: str, **settings) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "data.prepare", *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **settings,
    )


def alive(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if os.getpgid(int(path.name)) == group and "Z" not in (path / "stat").read_text().split(")")[1][:3]:
                    found.append(int(path.name))
            except (ProcessLookupError, FileNotFoundError):
                pass
    return found


def test_killed_at_any_moment_and_started_again(tmp_path):
    """The command itself, two workers, killed without warning several times; its workers end with it."""
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(16):
        (root / f"{number}.txt").write_text(sentences(number, 2500))
    overrides = ["data=text", f"data.path={root}", "data.vocab_size=320", "data.workers=2", "data.val_share=0.2"]
    process = run_command(*overrides, f"data.dir={tmp_path / 'whole'}")
    start = time.monotonic()
    output, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - start
    assert process.returncode == 0, output
    assert "whole is prepared: 320 tokenizer entries" in output and "encoding: 100 %" in output

    random.seed(0)
    killed = 0
    while killed < 3:
        process = run_command(*overrides, f"data.dir={tmp_path / 'killed'}")
        time.sleep(random.uniform(0.3, 0.9) * seconds)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        else:
            # it took less time than before: earlier, and from the beginning
            seconds /= 2
            shutil.rmtree(tmp_path / "killed")
        process.communicate(timeout=60)
        deadline = time.monotonic() + 10
        while alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(process.pid), "workers outlived the command"
    process = run_command(*overrides, f"data.dir={tmp_path / 'killed'}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "whole")

    start = time.monotonic()
    process = run_command(*overrides, f"data.dir={tmp_path / 'killed'}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "encoding" not in output
    process = run_command(*overrides, "data.add_bos=true", f"data.dir={tmp_path / 'killed'}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and output.startswith("error: ") and "data.add_bos was False, is True" in output
    assert "Traceback" not in output


def die(unit):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_an_error_not_a_hang(prepared, small_units, monkeypatch):
    config = dataclasses.replace(prepared, dir=f"{prepared.dir}2", workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(module, "work", die)
        with pytest.raises(ConfigError, match="a worker process was killed.*smaller data.workers"):
            prepare(config)
    prepare(config)
    assert content_of(config.dir).keys() == content_of(prepared.dir).keys() | {"train/00000.bin"}


def test_an_error_does_not_wait_for_the_other_workers(prepared, corpus):
    # one unit fails at once, the other one takes many times longer
    with gzip.open(corpus / "0.jsonl.gz", "wt", compresslevel=1) as file:
        line = json.dumps({"text": "the quick brown fox jumps " * 40})
        file.write(f"{line}\n" * 100_000)
    (corpus / "a.txt").write_bytes(b"\xff")
    config = dataclasses.replace(prepared, dir=f"{prepared.dir}2", workers=2)
    with pytest.raises(ConfigError, match="byte 0xFF is not UTF-8"):
        prepare(config)
    assert not list(Path(config.dir).glob("parts-*/*.npz")), "the long unit was worked on to its end"


def test_bad_input_in_a_worker_names_file_and_line(prepared, corpus, small_units):
    lines = (corpus / "d.jsonl").read_text().splitlines()
    lines[20] = lines[50] = "{"
    (corpus / "d.jsonl").write_text("\n".join(lines))
    config = dataclasses.replace(prepared, dir=f"{prepared.dir}2", workers=2)
    with pytest.raises(ConfigError, match=r"d\.jsonl, line (21|51): not one JSON object"):
        prepare(config)
    record = prepare(dataclasses.replace(config, dir=f"{prepared.dir}3", bad_input="skip"))
    assert record["counts"] == {"documents": 61, "broken": 2}


def test_writing_that_fails_says_so_and_can_go_on(prepared, monkeypatch):
    config = dataclasses.replace(prepared, dir=f"{prepared.dir}2")

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(encode, "_write_index", full)
        with pytest.raises(
            ConfigError, match=r"preparing .* failed: .*No space left on device.*start the same command"
        ):
            prepare(config)
    prepare(config)
    assert content_of(config.dir) == content_of(prepared.dir)
