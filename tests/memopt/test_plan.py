"""A plan foretells what a run measures: state to the byte, the highest moment within a few thousand bytes.

Background: a plan that lies sends a job to a queue that it cannot run in. State comes from formulas, peaks from a trace
of few blocks on fake tensors, and each can drift from the trainer by itself: a buffer that the trainer gained, an
optimizer's temporary, a rank whose shard is the larger one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from conf import compose
from memopt.microbatch_candidates import Candidate
from memopt.plan_arms import candidates_of, policies_of
from memopt.plan_peaks import Need, Peaks, predict
from memopt.plan_state import optimizer_bytes
from memopt.plan_trace import Shape, Tracer, build_mesh, fake_world, largest, meta_model, total
from models.names import named_parameters
from tests.spawn import run_apart
from tests.tiny import TINY, UNEVEN, train_ranks

OPTIMIZERS = ("adamw", "gefen", "rso", "rso_gefen")
SHORT = ["train.steps=3", "run.sample_tokens=0"]


def config_of(world_size: int, overrides: list[str]) -> Any:
    return compose.load_config([*TINY, *overrides], world_size)


def watch_every_step(run: Any) -> int:
    """Bytes of optimizer state of this rank, from its tensors."""
    run.microbatch.choose = lambda: True
    return run.optimizer.state_bytes()


def foretold_state(world_size: int, overrides: list[str]) -> int:
    config = config_of(world_size, overrides)
    with fake_world(world_size):
        model = meta_model(config, build_mesh(config, world_size), "none", torch.float32)
        found = optimizer_bytes(config.optimizer, model, named_parameters(model), "cpu")
    assert found.is_final
    return found.state


def foretold(world_size: int, overrides: list[str], rows: int) -> Need:
    config = config_of(world_size, overrides)
    (candidate,) = [one for one in candidates_of(config, world_size, policies_of(config)) if one.rows == rows]
    need = predict(config, world_size, "cpu", [candidate])[candidate].need
    assert need is not None
    return need


@pytest.mark.parametrize("world_size, mode", [(1, "fsdp"), (2, "ddp"), (3, "fsdp")])
def test_state_bytes_are_those_of_real_state(world_size: int, mode: str, tokens: Path, tmp_path: Path):
    """Uneven widths: rank 0, which is the one that is planned, has the largest shards."""
    for optimizer in OPTIMIZERS:
        settings = [f"optimizer={optimizer}", f"parallel={mode}", *UNEVEN]
        run = [*settings, "train.steps=1", "run.sample_tokens=0", "memory.ledger_step=0"]
        folder = f"run.dir={tmp_path / optimizer}"
        results = train_ranks(world_size, tokens, *run, folder, hook=lambda run: run.optimizer.state_bytes())
        real = [result["noted"] for result in results]
        assert run_apart(foretold_state, world_size, settings) == real[0] == max(real), optimizer


@pytest.mark.parametrize(
    "optimizer, policy, world_size, mode",
    [
        ("adamw", "none", 1, "fsdp"),
        ("adamw", "full", 2, "ddp"),
        ("gefen", "none", 2, "fsdp"),
        ("rso", "full", 2, "fsdp"),
        ("rso_gefen", "none", 1, "fsdp"),
    ],
)
def test_peak_is_the_measured_one(
    optimizer: str, policy: str, world_size: int, mode: str, tokens: Path, tmp_path: Path
):
    """Over all steps, the first one and a new subspace among them."""
    settings = [f"optimizer={optimizer}", f"activation_checkpoint={policy}", f"parallel={mode}", "microbatch=3"]
    if optimizer.startswith("rso"):
        settings.append("optimizer.interval=2")
    run = [*settings, *SHORT, f"run.dir={tmp_path}"]
    result = train_ranks(world_size, tokens, *run, hook=watch_every_step)[0]
    ledgers = [record["ledger"] for record in result["records"]]
    need = run_apart(foretold, world_size, settings, 3)
    highest = max(ledger["total"]["peak"] for ledger in ledgers)
    # what is not traced: the counter of tokens, sums of a norm, threads of gloo
    assert abs(need.bytes - highest) <= 0.01 * highest, (need, highest)
    for owner in ("parameters", "optimizer_state", "gradients"):
        assert need.persistent[owner] == ledgers[-1][owner]["persistent"], owner


def extended_and_whole(policy: str, optimizer: str) -> tuple[int, int]:
    config = config_of(2, ["model.layers=9", f"optimizer={optimizer}"])
    with fake_world(2):
        tracer = Tracer(config, build_mesh(config, 2), "cpu")
        shape = Shape(2, 6)
        found = [total(largest(places)[1]) for places in (tracer.places(policy, shape), tracer.whole(policy, shape))]
    return found[0], found[1]


@pytest.mark.parametrize("policy, optimizer", [("none", "adamw"), ("full", "rso"), ("selective", "adamw")])
def test_few_blocks_extended_are_the_whole_model(policy: str, optimizer: str):
    extended, whole = run_apart(extended_and_whole, policy, optimizer)
    assert extended == whole > 0


def needs_of_all(overrides: list[str], between: float) -> tuple[dict[Candidate, int], Candidate | None, float]:
    """Every candidate traced, and the search with a budget between two of them."""
    config = config_of(1, overrides)
    with fake_world(1):
        mesh = build_mesh(config, 1)
        model = meta_model(config, mesh, "none", torch.float32)
        state = optimizer_bytes(config.optimizer, model, named_parameters(model), "cpu")
        every = candidates_of(config, 1, ("none",))
        tracer = Tracer(config, mesh, "cpu")
        whole = Peaks(tracer, state, config, 12)
        needs = {candidate: whole.need(candidate).bytes for candidate in every}
        sizes = sorted(needs.values())
        usable = sizes[0] + between * (sizes[-1] - sizes[0])
        return needs, Peaks(tracer, state, config, 12).largest(every, usable), usable


@pytest.mark.parametrize("between", [-0.01, 0.0, 0.3, 0.6, 1.0])
def test_the_largest_fits_and_the_next_does_not(between: float):
    needs, found, usable = run_apart(needs_of_all, [], between)
    fitting = [candidate for candidate, size in needs.items() if size <= usable]
    assert found == (max(fitting, key=lambda one: one.rows) if fitting else None)
    assert (found is None) == (between < 0)
