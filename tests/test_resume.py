"""A stop and a resume change nothing, on the same ranks bit for bit, on any others up to rounding.

Background: a resume that repeats or skips a batch, restores moments of another step, drops a learning rate or lets an
old value win over a new one trains on happily. The unbroken run is the reference.
"""

import functools
import shutil
from pathlib import Path

import pytest
import torch

from observe.sinks.wandb_sink import WandbSink
from observe.summary import read_outcome
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
    "optimizer, world_size, layout", [("gefen", 1, "fsdp"), ("gefen", 3, "ddp"), ("gefen_paper", 2, "fsdp")]
)
def test_gefen_bit_for_bit(optimizer: str, world_size: int, layout: str, tokens: Path, tmp_path: Path):
    """Codes, codebook and learned periods come back; a momentum of other codes would show in every later loss."""
    settings = [*SAVING, f"optimizer={optimizer}", f"parallel={layout}", "microbatch=3"]
    unbroken = train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / 'unbroken'}")
    for stop in ("train.stop_after=1", "train.stop_after=5", "train.steps=8"):
        last = train_ranks(world_size, tokens, *settings, stop, f"run.dir={tmp_path / 'broken'}")
    assert torch.equal(losses(last[0]), losses(unbroken[0])[5:])
    for name, tensor in unbroken[0]["tensors"].items():
        assert torch.equal(last[0]["tensors"][name], tensor), name
    assert last[0]["tensors"]["optimizer.layers.0.attention.wo.weight.codes"].dtype == torch.uint8


@pytest.mark.parametrize("optimizer", ["gefen", "gefen_paper"])
def test_gefen_on_other_ranks_and_layout(optimizer: str, tokens: Path, tmp_path: Path):
    settings = [*SAVING, f"optimizer={optimizer}"]
    unbroken = train_ranks(1, tokens, *settings, f"run.dir={tmp_path / 'unbroken'}")[0]
    folder, records = f"run.dir={tmp_path / 'broken'}", []
    for world_size, overrides in (
        (2, ["parallel=fsdp", "train.stop_after=2"]),
        (3, ["parallel=ddp", "microbatch=1", "train.stop_after=4"]),
        (4, ["parallel=hsdp", "parallel.shard=2", "train.stop_after=6"]),
        (1, []),
    ):
        records += train_ranks(world_size, tokens, *settings, *overrides, folder)[0]["records"]
    torch.testing.assert_close(losses({"records": records}), losses(unbroken), rtol=1e-5, atol=0)


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
            last = read_lines(tmp_path / "events.jsonl")[-1]
            assert last["kind"] == "nothing to do" and last["train.steps"] == steps


def test_a_preempted_run_whose_goal_is_lowered_is_done(tokens: Path, tmp_path: Path):
    folder = f"run.dir={tmp_path}"
    train_ranks(2, tokens, *SAVING, "train.stop_after=4", folder)
    assert read_outcome(tmp_path) == "preempted"
    assert train_ranks(2, tokens, *SAVING, "train.steps=4", folder)[0]["records"] == []
    assert read_outcome(tmp_path) == "done"


def test_lines_of_steps_that_are_trained_again_are_set_aside(tokens: Path, tmp_path: Path):
    settings = ["checkpoint.interval=0", "train.steps=2", f"run.dir={tmp_path}"]
    train_ranks(1, tokens, *settings)
    first = read_lines(tmp_path / "metrics.jsonl")
    train_ranks(1, tokens, *settings)
    assert read_lines(tmp_path / "metrics.superseded.jsonl") == first
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_refuses_other_data(tokens: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(tokens, other)
    train_ranks(1, tokens, *SAVING, "train.stop_after=3", f"run.dir={tmp_path / 'run'}")
    # the same tokens elsewhere are the same data
    train_ranks(1, other, *SAVING, "train.stop_after=4", f"run.dir={tmp_path / 'run'}")
    two = f"data.sources=[{{path: {tokens}, weight: 1}}, {{path: {other}, weight: 1}}]"
    with pytest.raises(Exception, match="trained on other data"):
        train_ranks(1, tokens, *SAVING, two, "data.path=null", f"run.dir={tmp_path / 'run'}")


def test_a_damaged_newest_checkpoint_takes_the_whole_run_back(tokens: Path, tmp_path: Path):
    """Weights of one step with the data position or the token count of another skip samples in silence."""
    folder = f"run.dir={tmp_path}"
    first = train_ranks(2, tokens, *SAVING, "train.stop_after=5", folder)
    (tmp_path / "checkpoints" / "step-00000005" / "__0_0.distcp").unlink()
    again = train_ranks(2, tokens, *SAVING, "train.stop_after=5", folder)
    assert again[0]["start"] == 3 and ids(again) == ids(first)[3:]
    assert torch.equal(losses(again[0]), losses(first[0])[3:])
    assert all(torch.equal(tensor, again[0]["tensors"][name]) for name, tensor in first[0]["tensors"].items())
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["tokens"]) for line in lines] == [(step, step * 12 * 32) for step in range(1, 6)]


def test_momentum_of_the_first_step_comes_back(tokens: Path, tmp_path: Path):
    """State that is allocated late, or shaped unlike the parameter, trains well and fails in its first save."""
    momentum = ["optimizer=sgd", "optimizer.momentum=0.9", "checkpoint.interval=1", "train.steps=3"]
    settings = [*SAVING, *momentum, "checkpoint.keep=0", f"run.dir={tmp_path}"]
    unbroken = train_ranks(2, tokens, *settings)[0]
    again = train_ranks(2, tokens, *settings, "checkpoint.resume=1")[0]
    assert again["start"] == 1 and any(name.endswith(".momentum_buffer") for name in again["tensors"])
    assert all(torch.equal(tensor, again["tensors"][name]) for name, tensor in unbroken["tensors"].items())


def test_compiled_and_checkpointed_runs_read_each_others_checkpoints(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Names with a wrapper's prefix fail at a resume without it, or at the second one, or load nothing at all."""
    # without code generation, which takes a minute and has no part in names
    compiled = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    settings = [*SAVING, "train.eval_interval=0"]
    unbroken = train_ranks(1, tokens, *settings, f"run.dir={tmp_path / 'unbroken'}")[0]
    records = []
    for stop, wrapping in (
        (2, ["train.compile=true", "activation_checkpoint=full"]),
        (4, ["activation_checkpoint=selective"]),
        (6, ["train.compile=true"]),
        (8, []),
    ):
        stopping = ["" if stop == 8 else f"train.stop_after={stop}", f"run.dir={tmp_path / 'broken'}"]
        result = train_ranks(1, tokens, *settings, *wrapping, *filter(None, stopping))[0]
        assert result["start"] == stop - 2
        records += result["records"]
    assert_same_trajectory({**result, "records": records}, unbroken)


def test_the_run_of_wandb_is_part_of_a_checkpoint(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A new id at every restart cuts one run into pieces; a run of its own must not go on in another's."""
    monkeypatch.setattr(WandbSink, "_open", lambda self, mode: setattr(self, "_finished", True))

    def run_id(name: str, *overrides: str) -> str:
        settings = [*SAVING, "log.wandb.mode=offline", *overrides, f"run.dir={tmp_path / name}"]
        noted = [result["noted"] for result in train_ranks(2, tokens, *settings, hook=lambda run: run.observer.state)]
        assert noted[1] == {}, "one rank records"
        return noted[0]["wandb_id"]

    first = run_id("first", "train.stop_after=1")
    shutil.copytree(tmp_path / "first" / "checkpoints", tmp_path / "moved" / "checkpoints")
    assert run_id("first", "train.stop_after=2") == run_id("moved", "train.stop_after=2") == first
    assert run_id("fresh", "train.stop_after=1") != first
