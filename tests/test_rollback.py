"""A step that must not be taken sends the run back to its last checkpoint, and the batches since then are left out.

Expected is exactly the run that never saw these batches; also after a kill, whose restart meets the trouble again.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from conf.schema import TrainConfig
from dist.bad_steps import MIN_LOSSES, BadSteps, RollBack
from tests.tiny import read_lines, train_ranks

SETTINGS = [
    "train.nonfinite=rollback",
    "train.steps=12",
    "checkpoint.interval=4",
    "microbatch=4",
    "log.interval=5",
    "memory.ledger_step=0",
]


class watched_batches:
    """Wraps a run's loader: notes the batch that is trained on, and leaves out those in ``absent``."""

    def __init__(self, run, absent=()) -> None:
        self.index = -1
        take = type(run.loader).__next__

        class Watched(type(run.loader)):
            def __next__(loader):
                batch = take(loader)
                while batch.index in absent:
                    run.samples += run.config.train.global_batch
                    batch = take(loader)
                self.index = batch.index
                return batch

        run.loader.__class__ = Watched


def spoil_batches(run, factors: dict[int, float]) -> None:
    """Multiply the loss of these batches, on the last rank."""
    batches = watched_batches(run)
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    def hook(module, arguments, output):
        return output * factors[batches.index] if last and batches.index in factors else output

    run.model.register_forward_hook(hook)


def check_equal(result: dict, expected: dict) -> None:
    assert result["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert torch.equal(result["tensors"][name], tensor), name
    metrics, wanted = (read_lines(Path(run["folder"]) / "metrics.jsonl") for run in (result, expected))
    for key in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [record[key] for record in metrics] == [record[key] for record in wanted], key


@pytest.mark.parametrize(
    "optimizer, world_size, layout, saving",
    [
        ("adamw", 1, "fsdp", "true"),
        ("gefen", 3, "ddp", "false"),
        ("rso_gefen", 2, "fsdp", "true"),
    ],
)
def test_as_if_the_batches_had_never_been(optimizer, world_size, layout, saving, tokens: Path, tmp_path: Path):
    settings = [*SETTINGS, f"optimizer={optimizer}", f"parallel={layout}", f"checkpoint.async_save={saving}"]
    settings += ["optimizer.interval=3"] if "rso" in optimizer else []
    results = train_ranks(
        world_size, tokens, *settings, f"run.dir={tmp_path / 'run'}",
        hook=lambda run: spoil_batches(run, {1: math.nan, 8: math.inf}),
    )  # fmt: skip
    # batch 1 in step 2 goes back to step 0, batch 8 in step 7 to step 4
    absent = (0, 1, 6, 7, 8)
    expected = train_ranks(
        world_size, tokens, *settings, f"run.dir={tmp_path / 'clean'}", hook=lambda run: watched_batches(run, absent)
    )
    for result, wanted in zip(results, expected, strict=True):
        check_equal(result, wanted)
    events = read_lines(tmp_path / "run" / "events.jsonl")
    told = [(event["step"], event["left_out"]) for event in events if event["kind"] == "rollback"]
    assert told == [(0, [0, 1]), (4, [6, 8])]
    manifest = json.loads(next((tmp_path / "run" / "checkpoints").glob("step-*12/manifest.json")).read_text())
    assert manifest["meta"]["left_out"] == [[0, 1], [6, 8]]
    assert manifest["meta"]["samples"] == (12 + 5) * 12


@pytest.mark.parametrize("stop_after", [6, 8])
def test_a_restart_meets_the_same_trouble_or_goes_on_behind_it(stop_after: int, tokens: Path, tmp_path: Path):
    """Ended between the rollback and the next checkpoint, or with it; then more trouble after the restart."""
    spoilt = {6: math.nan, 12: math.nan}
    settings = [*SETTINGS, "checkpoint.async_save=false", f"run.dir={tmp_path / 'run'}"]

    def end_early(run):
        spoil_batches(run, spoilt)
        step = run.observer.step

        def observe(record):
            step(record)
            if record["step"] == stop_after - 1 and run.left_out:
                raise RuntimeError("ended on purpose")

        if stop_after % 4:
            run.observer.step = observe

    if stop_after % 4:
        with pytest.raises(Exception, match="ended on purpose"):
            train_ranks(2, tokens, *settings, hook=end_early)
    else:
        train_ranks(2, tokens, *settings, f"train.stop_after={stop_after}", hook=end_early)
    result = train_ranks(2, tokens, *settings, hook=lambda run: spoil_batches(run, spoilt))[0]
    assert result["start"] == (8 if stop_after == 8 else 4)
    absent = (4, 5, 6, 11, 12)
    whole = train_ranks(
        2, tokens, *SETTINGS, f"run.dir={tmp_path / 'clean'}", hook=lambda run: watched_batches(run, absent)
    )
    check_equal(result, whole[0])


def test_rollbacks_are_bounded(tokens: Path, tmp_path: Path):
    always = dict.fromkeys(range(5, 100), math.nan)
    message = (
        r"step 5: the loss is nan.*after 2 returns to the checkpoint of step 4 already; train\.max_rollbacks=2\. "
        r"Resume from an earlier checkpoint \(checkpoint\.resume=STEP\)"
    )
    with pytest.raises(Exception, match=message):
        train_ranks(
            2, tokens, *SETTINGS, "train.max_rollbacks=2", f"run.dir={tmp_path}",
            hook=lambda run: spoil_batches(run, always),
        )  # fmt: skip


@pytest.mark.parametrize("policy", ["skip", "rollback", "stop"])
def test_a_loss_that_jumps(policy: str, tokens: Path, tmp_path: Path):
    settings = [*SETTINGS, f"train.spike={policy}", "train.spike_sigmas=4", "train.steps=24", f"run.dir={tmp_path}"]

    def train():
        return train_ranks(2, tokens, *settings, hook=lambda run: spoil_batches(run, {20: 3.0}))[0]

    if policy == "stop":
        with pytest.raises(Exception, match="step 21: the loss is .* standard deviations above .* train.spike=stop"):
            train()
        return
    result = train()
    skipped = [record["step"] for record in read_lines(tmp_path / "metrics.jsonl") if record["skipped"]]
    assert skipped == ([21] if policy == "skip" else [])
    events = [event for event in read_lines(tmp_path / "events.jsonl") if event["kind"] in ("skip", "rollback")]
    assert [event["kind"] for event in events] == [policy]
    assert len(result["ids"]) == (25 if policy == "rollback" else 24)


def settings_of(**changes) -> TrainConfig:
    return TrainConfig(**{"spike": "skip", "spike_sigmas": 4.0, **changes})


def test_what_jumps_is_judged_by_the_last_good_losses():
    bad = BadSteps(settings_of())
    losses = [3.0 + 0.1 * (-1) ** number for number in range(MIN_LOSSES)]
    assert BadSteps(settings_of()).judge(100.0, 1.0) is None, "too few losses to say anything"
    for loss in losses:
        assert bad.judge(loss, 1.0) is None
    # mean 3, deviation 0.1
    assert bad.judge(3.39, 1.0) is None
    bad = BadSteps(settings_of(), losses)
    assert "4.1 standard deviations above the last 16 (mean 3.0000)" in bad.judge(3.41, 1.0)
    assert list(bad.losses) == losses, "a jump says nothing of what is usual"
    assert BadSteps(settings_of(spike="off"), losses).judge(100.0, 1.0) is None
    flat = BadSteps(settings_of(), [2.0] * MIN_LOSSES)
    assert flat.judge(2.001, 1.0) is None and flat.judge(2.1, 1.0)


def test_what_is_done_depends_on_what_was_wrong():
    bad = BadSteps(settings_of(nonfinite="rollback", max_skips=2), [2.0] * MIN_LOSSES)
    ended = []
    for step in (1, 2):
        bad.act(step, bad.judge(9.0, 1.0), lambda: ended.append(1))
    with pytest.raises(ValueError, match="3th step in a row; train.max_skips=2"):
        bad.act(3, bad.judge(9.0, 1.0), lambda: ended.append(1))
    assert ended == [1]
    with pytest.raises(RollBack, match="step 4: the loss is 2.0 and the gradient norm inf"):
        bad.act(4, bad.judge(2.0, math.inf), lambda: None)
    assert bad.judge(2.0, 1.0) is None
    bad.act(6, bad.judge(9.0, 1.0), lambda: None)
