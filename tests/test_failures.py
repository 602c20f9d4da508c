"""What must not happen to a run: a bad step in the weights, a rank that goes its own way, a message printed twice.

Background: a check for NaN that runs when metrics are logged comes after the update; an error on one rank leaves its
peers in a collective; a full disk takes the last good checkpoint with it.
"""

import math
import os
import re
from pathlib import Path

import pytest
import torch

from tests.tiny import ROOT, losses, read_lines, run_train, train_ranks


def spoil(run, at: dict[int, str]) -> None:
    """On the last rank, make the loss (``nan``) or the gradient (``inf``) of the given steps non-finite."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def hook(module, arguments, output):
        kind = at.get(run.step + 1)
        if not last or not output.requires_grad:
            return output
        if kind == "inf":
            output.register_hook(lambda gradient: gradient * math.inf)
        return output * math.nan if kind == "nan" else output

    run.model.register_forward_hook(hook)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("world_size, layout", [(1, "fsdp"), (2, "ddp"), (3, "fsdp")])
def test_bad_steps_are_skipped_by_all(optimizer: str, world_size: int, layout: str, tokens: Path, tmp_path: Path):
    settings = [f"parallel={layout}", f"optimizer={optimizer}", "microbatch=4", "log.interval=10"]

    def keep_before(run):
        spoil(run, {3: "nan", 4: "inf"})
        step, snapshots = run.observer.step, {}

        def observe(record):
            snapshots[record["step"]] = {
                name: tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()
                for name, tensor in train_tensors(run).items()
            }
            if record["step"] in (3, 4):
                before, after = snapshots[record["step"] - 1], snapshots[record["step"]]
                assert all(torch.equal(before[name], after[name]) for name in before), "a bad step touched the run"
            if record["step"] == 5:
                assert any(not torch.equal(snapshots[4][name], snapshots[5][name]) for name in snapshots[4])
            step(record)

        run.observer.step = observe

    results = train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / 'run'}", hook=keep_before)
    for result in results:
        assert [record["skipped"] for record in result["records"]] == [False, False, True, True, False, False]
        assert math.isnan(result["records"][2]["loss"]) and math.isfinite(result["records"][3]["loss"])
        assert len(result["ids"]) == 6, "a skipped step consumes its batch"
    clean = train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / 'clean'}")[0]
    assert results[0]["ids"] == clean["ids"]
    assert [r["lr"] for r in results[0]["records"]] == [r["lr"] for r in clean["records"]]
    events = [event for event in read_lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "skip"]
    assert [(event["step"], event["in_a_row"]) for event in events] == [(3, 1), (4, 2)]


def train_tensors(run):
    import train

    return train.tensors_of(run.model, run.optimizer)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["train.nonfinite=stop"], "step 2: the loss is nan.*train.nonfinite=stop"),
        (["train.max_skips=1"], "2th step in a row; train.max_skips=1"),
    ],
)
def test_skips_are_bounded(overrides: list[str], message: str, tokens: Path, tmp_path: Path):
    always = dict.fromkeys(range(2, 9), "nan")
    with pytest.raises(Exception, match=message):
        train_ranks(2, tokens, *overrides, f"run.dir={tmp_path}", hook=lambda run: spoil(run, always))


def messages(result) -> list[str]:
    return re.findall(r"^error: .*", result.stderr, re.MULTILINE)


def run_faulty(fault: str, arguments: list[str], processes: int):
    """``tests/faulty.py`` under torchrun: train.py with one thing broken on one rank."""
    return run_train([*arguments], processes, script=("-m", "tests.faulty"), FAULT=fault)


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize(
    "fault, status, words",
    [
        ("raise in forward", "failed", "RuntimeError: broken on purpose"),
        ("raise in optimizer", "failed", "RuntimeError: broken on purpose"),
        ("raise in loader", "failed", "the data loader stopped: broken on purpose"),
        ("raise in data", "failed", "broken on purpose"),
    ],
)
def test_an_error_on_one_rank_ends_all_and_is_told_once(
    fault: str, status: str, words: str, processes: int, tokens: Path, tmp_path: Path
):
    import json
    import time

    start = time.perf_counter()
    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=1000"]
    result = run_faulty(fault, arguments, processes)
    assert result.returncode != 0
    assert time.perf_counter() - start < 60
    assert len(messages(result)) == 1, result.stderr
    assert words in result.stderr
    assert json.loads((tmp_path / "status.json").read_text())["outcome"] == status


@pytest.mark.parametrize("death", ["exit 0", "exit 1", "kill"])
def test_a_rank_that_vanishes_ends_all(death: str, tokens: Path, tmp_path: Path):
    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=1000", "checkpoint.interval=2"]
    result = run_faulty(death, arguments, 2)
    assert result.returncode != 0
    # what was saved before is still there and resumes
    again = run_train([*arguments[:3], "train.steps=8", "checkpoint.interval=2"], 2)
    assert again.returncode == 0, again.stderr
    first = read_lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in first] == list(range(1, 9))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["data=tokens", "data.path=/nowhere"], "/nowhere"),
        (["data=stdlib", "data.dir=/nowhere"], "python -m data.prepare"),
        (["data=tokens", "data.path={tokens}", "model.vocab_size=257", "data.vocab_size=257"], "257"),
        (["data=tokens", "data.path={tokens}", "model.max_seq_len=900000", "train.seq_len=800000"], "800000"),
        (["data=tokens", "data.path={tokens}", "run.dir=/proc/nowhere"], "/proc/nowhere"),
        (["data=tokens", "data.path={tokens}", "run.device=cuda"], "no GPU"),
        (["data=tokens", "data.path={tokens}", "train.global_batch=13"], "global_batch=13"),
        (["data=tokens", "data.path={tokens}", "checkpoint.resume=3"], "3"),
    ],
)
def test_bad_input_is_told_once(arguments: list[str], words: str, tokens: Path, tmp_path: Path):
    arguments = [argument.format(tokens=tokens) for argument in arguments]
    if not any(argument.startswith("run.dir") for argument in arguments):
        arguments.append(f"run.dir={tmp_path / 'run'}")
    result = run_train(arguments, 2)
    assert result.returncode != 0
    assert len(messages(result)) == 1, result.stderr
    assert words in messages(result)[0]
    # the launcher has a traceback of its own
    assert "train.py" not in result.stderr.split("torch/distributed/")[0] or "Traceback" not in result.stderr[:200]


def test_another_run_in_the_folder_is_refused_and_loses_nothing(tokens: Path, tmp_path: Path):
    settings = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "checkpoint.interval=3"]
    assert run_train(settings).returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for change, words in ((["model.dim=32"], "model.dim"), (["optimizer=sgd"], "optimizer.name")):
        result = run_train([*settings, *change])
        assert result.returncode != 0 and len(messages(result)) == 1 and words in messages(result)[0]
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changed = {path.name for path in before if after.get(path) != before[path]}
    assert changed <= {"status.json"}


def test_the_whole_run_under_torchrun(tokens: Path, tmp_path: Path):
    import json

    settings = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "checkpoint.interval=2"]
    stopped = run_train([*settings, "train.stop_after=3"], 2)
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads((tmp_path / "status.json").read_text())["outcome"] == "preempted"
    assert run_train([*settings, "train.stop_after=4"]).returncode == 75
    done = run_train(settings, 2)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "done" and summary["steps"] == 6 and summary["world_size"] == 2
    assert summary["tokens"] == 6 * 12 * 32 and summary["mfu"] is None
    assert summary["optimizer_state_bytes_per_param"] == pytest.approx(8, rel=0.01)
    assert summary["val_loss"] == pytest.approx(summary["loss"], rel=0.2)
    for name in ("config.yaml", "events.jsonl", "metrics.jsonl", "loss.png", "checkpoints/step-00000006"):
        assert (tmp_path / name).exists(), name
    rates = [record["tokens_per_second"] * record["step_seconds"] for record in read_lines(tmp_path / "metrics.jsonl")]
    assert rates == pytest.approx([12 * 32] * 6)
    assert losses({"records": read_lines(tmp_path / "metrics.jsonl")}).isfinite().all()
    assert str(ROOT) not in (tmp_path / "metrics.jsonl").read_text()
