"""Runs with ``optimizer=rso``: one trajectory on any ranks, layout and microbatch, and across a stop within a subspace.

Background: a projection drawn differently on two ranks, a subspace that changes between two microbatches of a step, a
merge that one replica misses or a resume into another subspace all train, and all train something else.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.test_resume import SAVING
from tests.test_trajectory import assert_same_trajectory, reference
from tests.tiny import UNEVEN, losses, train_ranks

RSO = ["optimizer.rank=5", "optimizer.interval=7"]


@pytest.mark.parametrize(
    "projection, world_size, overrides",
    [
        ("coordinate", 1, ["microbatch=5"]),
        ("coordinate", 2, ["parallel=ddp", "microbatch=3"]),
        ("coordinate", 3, ["parallel=fsdp", "microbatch=2", "activation_checkpoint=full"]),
        ("coordinate", 4, ["parallel=hsdp", "parallel.shard=2", "parallel.reduce=last", "microbatch=1"]),
        ("haar", 1, ["microbatch=2", "activation_checkpoint=selective"]),
        ("haar", 3, ["parallel=ddp", "parallel.reduce=every", "microbatch=2"]),
        ("haar", 4, ["parallel=fsdp", "parallel.reshard=false"]),
        ("gaussian", 2, ["parallel=fsdp", "microbatch=2"]),
    ],
    ids=str,
)
def test_rso_follows_one_process(projection: str, world_size: int, overrides: list[str], tokens: Path, tmp_path: Path):
    settings = ["optimizer=rso", f"optimizer.projection={projection}", *RSO]
    expected = reference(tokens, *settings, f"run.dir={tmp_path.parent / projection}")
    results = train_ranks(world_size, tokens, *settings, "train.steps=50", *UNEVEN, *overrides, f"run.dir={tmp_path}")
    # the first step in a subspace is the sign of the gradient, also of one that is rounding: moments are reset
    torch.testing.assert_close(losses(results[0]), losses(expected), rtol=1e-5, atol=0)
    assert_same_trajectory(results[0], expected, rtol=2e-4)
    for other in results[1:]:
        assert all(torch.equal(tensor, other["tensors"][name]) for name, tensor in results[0]["tensors"].items())
    assert results[0]["tensors"]["optimizer.rso.outer"] == 50 // 7


@pytest.mark.parametrize("optimizer", ["rso", "rso_gefen"])
@pytest.mark.parametrize("world_size, layout", [(1, "fsdp"), (3, "ddp"), (2, "fsdp")])
def test_a_resume_within_a_subspace_is_bit_for_bit(
    optimizer: str, world_size: int, layout: str, tokens: Path, tmp_path: Path
):
    settings = [*SAVING, f"optimizer={optimizer}", f"parallel={layout}", "microbatch=3", "optimizer.interval=3"]
    unbroken = train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / 'unbroken'}")
    for stop in ("train.stop_after=3", "train.stop_after=5", "train.steps=8"):
        last = train_ranks(world_size, tokens, *settings, stop, f"run.dir={tmp_path / 'broken'}")
    assert torch.equal(losses(last[0]), losses(unbroken[0])[5:])
    for name, tensor in unbroken[0]["tensors"].items():
        assert torch.equal(last[0]["tensors"][name], tensor), name


@pytest.mark.parametrize("optimizer", ["rso", "rso_gefen"])
def test_a_resume_on_other_ranks_and_layout(optimizer: str, tokens: Path, tmp_path: Path):
    settings = [*SAVING, f"optimizer={optimizer}", "optimizer.projection=haar", "optimizer.interval=3"]
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


def test_the_checkpoint_has_weights_and_no_projections(tokens: Path, tmp_path: Path):
    settings = ["optimizer=rso", "train.steps=1", f"run.dir={tmp_path}"]
    tensors = train_ranks(1, tokens, *settings)[0]["tensors"]
    dense = train_ranks(1, tokens, "train.steps=1", f"run.dir={tmp_path / 'dense'}")[0]["tensors"]
    assert {name for name in tensors if name.startswith("model.")} == {name for name in dense if name[0] == "m"}
    own = {name for name in tensors if name.startswith("optimizer.rso.")}
    assert own == {f"optimizer.rso.{key}" for key in ("outer", "steps", "key", "progress")}
    assert tensors["optimizer.layers.0.attention.wo.subspace.exp_avg"].shape == (64, 16)
    assert not any(name.endswith("wo.weight.exp_avg") for name in tensors)


@pytest.mark.parametrize(
    "changed, words",
    [
        (["optimizer=adamw"], "optimizer.name: rso and adamw"),
        (["optimizer.rank=4"], "subspace"),
        (["optimizer.projection=haar"], "projection=coordinate"),
        (["optimizer.seed=1"], "seed=0"),
    ],
    ids=str,
)
def test_another_optimizer_or_subspace_cannot_resume(changed: list[str], words: str, tokens: Path, tmp_path: Path):
    settings = [*SAVING, "optimizer=rso", "optimizer.rank=5", f"run.dir={tmp_path}", "train.stop_after=3"]
    train_ranks(1, tokens, *settings)
    if changed == ["optimizer=adamw"]:
        settings = [each for each in settings if not each.startswith("optimizer")]
    with pytest.raises(Exception, match=words):
        train_ranks(1, tokens, *settings, "train.stop_after=5", *changed)


def test_the_log_says_what_is_projected_and_what_stays_dense(tokens: Path, tmp_path: Path):
    train_ranks(1, tokens, "optimizer=rso", "optimizer.rank=64", "train.steps=1", f"run.dir={tmp_path}")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    notes = {event["layers"]: event for event in events if event["kind"] == "optimizer"}
    assert notes["layers.*.feed_forward.w2"].items() >= {
        "count": 2, "rank": 64, "width": 96, "gradient_bytes": 2 * 4 * 64 * 64, "dense_bytes": 2 * 4 * 64 * 96
    }.items()  # fmt: skip
    assert notes["layers.*.attention.wo"]["stays_dense"] == "rank 64 of 64"
