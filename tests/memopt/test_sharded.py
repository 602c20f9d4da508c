"""Background: torch's optimizers keep state for every row a rank holds, so that under DDP and HSDP each replica holds
all of it. Ours is sharded over every rank. The shapes below give even, uneven and empty shards at 2, 3 and 4 ranks,
and fewer rows than ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conf.checks import ConfigError
from conf.optimizers import AdamWConfig, SGDConfig
from conf.schema import ScheduleConfig
from memopt import layout
from memopt.build import build_optimizer, decayed_names, lr_factor
from tests.spawn import run_ranks

SHAPES = {"even": (12, 5), "uneven": (7, 3), "one_row": (1, 6), "vector": (5,), "two_rows": (2, 2)}
LAYOUTS = [(1, (1,)), (2, (2,)), (2, (2, 1)), (3, (3,)), (3, (3, 1)), (4, (4,)), (4, (2, 2)), (4, (4, 1))]
CONFIGS = {"adamw": AdamWConfig(lr=0.1, weight_decay=0.1), "sgd": SGDConfig(lr=0.1, momentum=0.9, weight_decay=0.1)}


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sharded(full: torch.Tensor, mesh) -> torch.Tensor:
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    return distribute_tensor(full.clone(), mesh, placements)


def reference(config, steps: int) -> dict[str, torch.Tensor]:
    parameters = {name: nn.Parameter(value) for name, value in full_tensors(0).items()}
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if isinstance(config, AdamWConfig):
        optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))
    else:
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for step in range(steps):
        for name, grad in full_tensors(step + 1).items():
            parameters[name].grad = grad
        optimizer.step()
    state = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}[config.name]
    result = {name: parameter.detach() for name, parameter in parameters.items()}
    return result | {f"{name}.{key}": optimizer.state[parameters[name]][key] for name in parameters for key in state}


def train(rank: int, world_size: int, mesh_shape: tuple[int, ...], config, steps: int):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp_replicate", "fsdp")[-len(mesh_shape) :])
    parameters = {name: nn.Parameter(sharded(value, mesh)) for name, value in full_tensors(0).items()}
    optimizer = build_optimizer(config, parameters)
    for step in range(steps):
        for name, grad in full_tensors(step + 1).items():
            parameters[name].grad = sharded(grad, mesh)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_tensors()
    full = {name: tensor.full_tensor() for name, tensor in (parameters | state).items() if isinstance(tensor, DTensor)}
    return {name: tensor.detach() for name, tensor in full.items()}, optimizer.state_bytes()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("world_size, mesh_shape", LAYOUTS)
def test_every_layout_follows_the_plain_optimizer(name, world_size, mesh_shape):
    expected = reference(CONFIGS[name], steps=3)
    results = run_ranks(world_size, train, mesh_shape, CONFIGS[name], 3)
    for rank, (full, _) in enumerate(results):
        assert full.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(full[key], value, rtol=1e-6, atol=1e-7, msg=f"rank {rank}: {key}")


@pytest.mark.parametrize("world_size, mesh_shape", LAYOUTS)
def test_state_is_held_once(world_size, mesh_shape):
    """Over all ranks: two fp32 moments per element and one counter per parameter and rank, whatever the layout."""
    results = run_ranks(world_size, train, mesh_shape, CONFIGS["adamw"], 1)
    elements = sum(tensor.numel() for tensor in full_tensors(0).values())
    assert sum(held for _, held in results) == 8 * elements + 4 * len(SHAPES) * world_size


def owned_rows_on_two_by_two(rank: int, world_size: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    full = torch.arange(7.0)[:, None]
    owned = layout.owned_rows(sharded(full, mesh))
    return owned.flatten().tolist(), layout.as_state(owned, sharded(full, mesh)).full_tensor().flatten().tolist()


def test_rows_have_one_owner():
    results = run_ranks(4, owned_rows_on_two_by_two)
    assert sorted(row for owned, _ in results for row in owned) == list(range(7))
    assert all(full == list(range(7)) for _, full in results)


@pytest.mark.parametrize("name", CONFIGS)
def test_allocating_state_early_changes_nothing(name):
    def run(early: bool):
        parameters = {key: nn.Parameter(value) for key, value in full_tensors(0).items()}
        optimizer = build_optimizer(CONFIGS[name], parameters)
        random_state = torch.get_rng_state()
        if early:
            optimizer.init_state()
        assert torch.equal(torch.get_rng_state(), random_state)
        for step in range(3):
            for key, grad in full_tensors(step + 1).items():
                parameters[key].grad = grad
            optimizer.step()
        return {key: value.clone() for key, value in (parameters | optimizer.state_tensors()).items()}

    early, late = run(True), run(False)
    assert all(torch.equal(early[key], late[key]) for key in late)


def test_a_parameter_without_gradient_is_left_alone():
    parameters = {name: nn.Parameter(value) for name, value in full_tensors(0).items()}
    optimizer = build_optimizer(CONFIGS["adamw"], parameters)
    for name, grad in full_tensors(1).items():
        parameters[name].grad = None if name == "even" else grad
    optimizer.step()
    assert torch.equal(parameters["even"], full_tensors(0)["even"])
    assert optimizer.state_tensors()["even.step"] == 0 and optimizer.state_tensors()["uneven.step"] == 1


def test_decay_selects_matrices_or_patterns():
    parameters = full_tensors(0)
    assert decayed_names([], parameters) == {"even", "uneven", "one_row", "two_rows"}
    assert decayed_names(["v*", "even"], parameters) == {"vector", "even"}
    with pytest.raises(ConfigError, match="'layers.*' *, which matches no parameter|matches no parameter"):
        decayed_names(["even", "layers.*"], parameters)


def test_schedules():
    def trace(kind: str, steps: int = 10, **options) -> list[float]:
        config = ScheduleConfig(kind=kind, **{"warmup": 2, "min_ratio": 0.1, **options})
        return [round(lr_factor(config, step, steps), 6) for step in range(1, steps + 1)]

    assert trace("constant") == [0.5] + [1.0] * 9
    assert trace("linear", warmup=0) == [round(1 - 0.09 * step, 6) for step in range(1, 11)]
    assert trace("cosine")[1] == 1.0 and trace("cosine")[5] == 0.55 and trace("cosine")[-1] == 0.1
    assert trace("wsd", decay_share=0.4) == [0.5, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1]
    assert trace("cosine", steps=1) == [0.5]
