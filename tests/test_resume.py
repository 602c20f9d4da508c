"""A stop and a resume change nothing, on the same ranks bit for bit, on any others up to rounding.

Background: a resume that repeats or skips a batch, restores moments of another step, drops a learning rate or lets an
old value win over a new one trains on happily. The unbroken run is the reference.
"""

import shutil
from pathlib import Path

import pytest
import torch

from tests.test_trajectory import GPT2, assert_same_trajectory
from tests.tiny import UNEVEN, losses, read_lines, train_ranks

# evaluating in the step that is saved: an evaluation must leave the parameters as a checkpoint wants them
SAVING = ["train.steps=8", "checkpoint.interval=3", "train.eval_interval=3", "train.eval_tokens=200", *UNEVEN]


def ids(results: list[dict]) -> list[list[int]]:
    """The samples of every global batch, in rank order."""
    return [sum(parts, []) for parts in zip(*(result["ids"] for result in results), strict=True)]


@pytest.mark.parametrize("async_save", ["true", "false"])
@pytest.mark.parametrize("world_size, layout", [(1, "fsdp"), (2, "fsdp"), (2, "ddp"), (3, "fsdp")])
def test_same_ranks_bit_for_bit(world_size: int, layout: str, async_save: str, tokens: Path, tmp_path: Path):
    settings = [*SAVING, f"parallel={layout}", "microbatch=3", f"checkpoint.async_save={async_save}"]
    unbroken = train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / 'unbroken'}")
    first = train_ranks(world_size, tokens, *settings, "train.stop_after=5", f"run.dir={tmp_path / 'broken'}")
    second = train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / 'broken'}")
    assert first[0]["outcome"] == "preempted" and second[0]["outcome"] == "done" and second[0]["start"] == 5
    assert ids(first) + ids(second) == ids(unbroken)
    assert torch.equal(torch.cat([losses(first[0]), losses(second[0])]), losses(unbroken[0]))
    for name, tensor in unbroken[0]["tensors"].items():
        assert torch.equal(second[0]["tensors"][name], tensor), name
    steps = [record["step"] for record in read_lines(tmp_path / "broken" / "metrics.jsonl")]
    assert steps == list(range(1, 9))


@pytest.mark.parametrize(
    "before, after",
    [
        ((2, ["parallel=fsdp"]), (1, [])),
        ((2, ["parallel=fsdp"]), (3, ["parallel=ddp", "microbatch=1"])),
        ((2, ["parallel=ddp"]), (4, ["parallel=hsdp", "parallel.shard=2", "microbatch=2"])),
        ((4, ["parallel=hsdp", "parallel.shard=2"]), (3, ["parallel=fsdp", "activation_checkpoint=full"])),
        ((1, []), (4, ["parallel=fsdp"])),
    ],
    ids=str,
)
def test_other_ranks_and_layout(before, after, tokens: Path, tmp_path: Path):
    unbroken = train_ranks(1, tokens, *SAVING, f"run.dir={tmp_path / 'unbroken'}")[0]
    folder = f"run.dir={tmp_path / 'broken'}"
    first = train_ranks(before[0], tokens, *SAVING, *before[1], "train.stop_after=5", folder)
    second = train_ranks(after[0], tokens, *SAVING, *after[1], folder)
    assert ids(first) + ids(second) == unbroken["ids"]
    joined = {**second[0], "records": first[0]["records"] + second[0]["records"]}
    assert_same_trajectory(joined, unbroken)


def test_dropout_draws_what_the_unbroken_run_drew(tokens: Path, tmp_path: Path):
    settings = [*GPT2, "train.steps=6", "checkpoint.interval=3", "model.dropout=0.2", "microbatch=3"]
    unbroken = train_ranks(2, tokens, *settings, f"run.dir={tmp_path / 'unbroken'}")[0]
    folder = f"run.dir={tmp_path / 'broken'}"
    train_ranks(2, tokens, *settings, "train.stop_after=4", folder)
    second = train_ranks(2, tokens, *settings, folder)[0]
    assert torch.equal(losses(second), losses(unbroken)[4:])


def test_other_batch_size_goes_on_at_the_next_sample(tokens: Path, tmp_path: Path):
    folder = f"run.dir={tmp_path}"
    first = train_ranks(2, tokens, *SAVING, "train.stop_after=5", folder)
    second = train_ranks(1, tokens, *SAVING, "train.global_batch=6", "train.stop_after=6", folder)
    third = train_ranks(1, tokens, *SAVING, "train.global_batch=6", folder)
    seen = sum(ids(first) + ids(second) + ids(third), [])
    one = train_ranks(1, tokens, *SAVING, "train.global_batch=6", f"run.dir={tmp_path / 'one'}", "train.steps=13")
    assert seen == sum(ids(one), [])
    assert third[0]["records"][-1]["tokens"] == (5 * 12 + 3 * 6) * 32


def test_new_learning_rate_wins_from_the_first_resumed_step(tokens: Path, tmp_path: Path):
    folder = f"run.dir={tmp_path}"
    train_ranks(1, tokens, *SAVING, "train.stop_after=3", "schedule.kind=constant", folder)

    def check_groups(run):
        step = run.optimizer.step

        def checked():
            assert [(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups] == [
                (0.0123, 0.5),
                (0.0123, 0.0),
            ]
            step()

        run.optimizer.step = checked

    changed = ["schedule.kind=constant", "optimizer.lr=0.0123", "optimizer.weight_decay=0.5"]
    second = train_ranks(1, tokens, *SAVING, *changed, folder, hook=check_groups)[0]
    assert [record["lr"] for record in second["records"]] == [0.0123] * 5
    start = [event for event in read_lines(tmp_path / "events.jsonl") if event["kind"] == "start"][-1]
    assert start["changed"]["optimizer.lr"] == [0.001, 0.0123]


def test_finished_is_finished_and_more_steps_are_only_the_difference(tokens: Path, tmp_path: Path):
    folder = f"run.dir={tmp_path}"
    train_ranks(1, tokens, *SAVING, folder)
    summary = (tmp_path / "summary.json").read_text()
    for steps, trained in ((8, 0), (5, 0), (11, 3)):
        result = train_ranks(1, tokens, *SAVING, f"train.steps={steps}", folder)[0]
        assert (len(result["records"]), result["outcome"]) == (trained, "done")
        if not trained:
            assert (tmp_path / "summary.json").read_text() == summary


def test_refuses_other_data(tokens: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(tokens, other)
    train_ranks(1, tokens, *SAVING, "train.stop_after=3", f"run.dir={tmp_path / 'run'}")
    # the same tokens elsewhere are the same data
    train_ranks(1, other, *SAVING, "train.stop_after=4", f"run.dir={tmp_path / 'run'}")
    two = f"data.sources=[{{path: {tokens}, weight: 1}}, {{path: {other}, weight: 1}}]"
    with pytest.raises(Exception, match="trained on other data"):
        train_ranks(1, tokens, *SAVING, two, "data.path=null", f"run.dir={tmp_path / 'run'}")
