"""Background: the public Gefen learns codebook and periods per rank and searches the local shard, so that its state
depends on the number of ranks. Ours must not: from the same full gradients, the same bits of state and weights on 1 to
4 ranks, under FSDP, HSDP and DDP, with even, uneven and empty shards. Each rank has only its rows of the gradient."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dist.checkpoint import Checkpointer
from memopt import Gefen
from tests.spawn import run_ranks

# even, uneven and empty shards at 2, 3 and 4 ranks; "dead" has no gradient but zeros until the third step
SHAPES = {
    "even": (12, 96), "uneven": (7, 24), "one_row": (1, 40), "two_rows": (2, 13), "dead": (5, 16), "vector": (5,),
    "one": (1,),
}  # fmt: skip
LAYOUTS = [(2, (2,)), (2, (2, 1)), (3, (3,)), (3, (3, 1)), (4, (4,)), (4, (2, 2)), (4, (4, 1))]
VARIANTS = {
    "default": {},
    "block": {"second_moment": "block"},
    "fp32": {"momentum": "fp32"},
    "paper": {"partition": "paper", "second_moment": "block", "zero_level": False},
    "peaks": {"partition": "peaks", "refresh": 3, "drift_interval": 2},
    "fixed": {"partition": "fixed", "block": 1, "levels": 16, "update": "quantised", "max_update": 1.0},
}
STEPS = 5
LR = 0.05


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Gradients whose size depends on row and column and, in "even", on blocks of 12."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in SHAPES.items():
        tensor = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            tensor = tensor * torch.linspace(0.1, 2, shape[0])[:, None] * torch.linspace(0.5, 3, shape[1])
        tensors[name] = tensor
    tensors["even"] = tensors["even"].sign() * tensors["even"][:, ::12].abs().repeat_interleave(12, dim=1)
    if 0 < seed < 3:
        tensors["dead"].zero_()
    return tensors


def place(full: torch.Tensor, mesh) -> torch.Tensor:
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    return distribute_tensor(full.clone(), mesh, placements)


def build(variant: str, parameters: dict[str, nn.Parameter], **more) -> Gefen:
    matrices = [(name, parameter) for name, parameter in parameters.items() if parameter.ndim > 1]
    rest = [(name, parameter) for name, parameter in parameters.items() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return Gefen(groups, LR, (0.9, 0.95), **VARIANTS[variant], **more)


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full values of all tensors; collective."""
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def train_alone(variant: str, steps: int = STEPS) -> dict[str, torch.Tensor]:
    parameters = {name: nn.Parameter(value) for name, value in full_tensors(0).items()}
    optimizer = build(variant, parameters)
    for step in range(1, steps + 1):
        for name, grad in full_tensors(step).items():
            parameters[name].grad = grad
        optimizer.step()
    return whole(parameters | optimizer.state_tensors())


def train_sharded(rank: int, world_size: int, mesh_shape: tuple[int, ...], variant: str):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :])
    parameters = {name: nn.Parameter(place(value, mesh)) for name, value in full_tensors(0).items()}
    optimizer = build(variant, parameters)
    gauges = []
    for step in range(1, STEPS + 1):
        for name, grad in full_tensors(step).items():
            parameters[name].grad = place(grad, mesh)
        optimizer.step()
        optimizer.zero_grad()
        gauges.append(optimizer.gauges())
    held = sum(tensor.to_local().nbytes for tensor in optimizer.state_tensors().values() if isinstance(tensor, DTensor))
    return whole(parameters | optimizer.state_tensors()), held, gauges


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), f"{where}: {name}"


@pytest.mark.parametrize("world_size, mesh_shape", LAYOUTS)
def test_state_and_weights_are_those_of_one_process(world_size: int, mesh_shape: tuple[int, ...]):
    variants = VARIANTS if mesh_shape in ((3,), (2, 2)) else ("default", "paper")
    for variant in variants:
        expected = train_alone(variant)
        results = run_ranks(world_size, train_sharded, mesh_shape, variant)
        for rank, (found, _, gauges) in enumerate(results):
            assert_same(found, expected, f"{variant}, rank {rank}")
            assert gauges == results[0][2]
        # all state with rows is held once, whatever the layout
        rows = sum(value.nbytes for name, value in expected.items() if name.split(".")[-1] in ROW_STATE)
        assert sum(held for _, held, _ in results) == rows


ROW_STATE = ("codes", "scale", "momentum", "m", "v")


def test_the_variants_are_told_apart():
    """The comparison above means something only if learned periods and codebooks differ from the defaults."""
    results = {variant: train_alone(variant) for variant in VARIANTS}
    assert results["paper"]["even.period"] == 12 and results["default"]["even.period"] == 96
    assert not torch.equal(results["paper"]["codebook.levels"], results["default"]["codebook.levels"])
    assert results["fixed"]["codebook.levels"].shape == (16,)


def train_ddp(rank: int, world_size: int, shared: bool):
    """torch's DDP; every rank has other data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 24), nn.Tanh(), nn.Linear(24, 5))
    wrapped = nn.parallel.DistributedDataParallel(model)
    group = torch.distributed.group.WORLD if shared else None
    optimizer = Gefen(wrapped.named_parameters(), LR, process_group=group)
    for step in range(4):
        inputs = torch.randn(12, 13, generator=torch.Generator().manual_seed(step))[rank::world_size]
        optimizer.zero_grad()
        wrapped(inputs).square().sum().backward()
        optimizer.step()
    saved = copy.deepcopy({key: value.detach() for key, value in model.state_dict().items()})
    state = whole(optimizer.state_tensors())
    again = Gefen(wrapped.named_parameters(), LR, process_group=group)
    again.load_state_dict(optimizer.state_dict())
    assert_same(whole(again.state_tensors()), state, "loaded")
    return saved, state, optimizer.state_bytes()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_under_ddp_a_process_group_shares_the_state_out(world_size: int):
    replicated = run_ranks(world_size, train_ddp, False)
    shared = run_ranks(world_size, train_ddp, True)
    for (weights, state, _), (their_weights, their_state, _) in zip(replicated, shared, strict=True):
        assert_same(their_weights, weights, "weights")
        assert_same(their_weights, shared[0][0], "weights of rank 0")
        assert_same(their_state, state, "state")
    if world_size > 1:
        fixed = 5000  # codebooks and columns, which every rank holds
        assert sum(held for _, _, held in shared) < replicated[0][2] + world_size * fixed


def train_fsdp(rank: int, world_size: int):
    """FSDP2 without anything of the trainer: wrapped unit by unit, uneven rows, other data on each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 25), nn.Tanh(), nn.Linear(25, 5), nn.LayerNorm(5))
    if world_size > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model).set_force_sum_reduction_for_comms(True)
        for layer in model:
            layer.set_force_sum_reduction_for_comms(True)
    optimizer = Gefen(model.named_parameters(), LR)
    losses = []
    for step in range(8):
        inputs = torch.randn(12, 13, generator=torch.Generator().manual_seed(step))[rank::world_size]
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :5]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    torch.distributed.all_reduce(total)
    return total / world_size, optimizer.state_dict()["state"][0]["codes"]


def test_a_plain_fsdp_model_trains_as_on_one_process():
    expected, codes = run_ranks(1, train_fsdp)[0]
    for world_size in (2, 3):
        for total, sharded_codes in run_ranks(world_size, train_fsdp):
            torch.testing.assert_close(total, expected, rtol=1e-3, atol=1e-5)
            assert sharded_codes.shape == codes.shape == (25, 13) and sharded_codes.dtype == torch.uint8
    assert expected[-1] < expected[0]


def save(rank: int, world_size: int, mesh_shape: tuple[int, ...], variant: str, folder: Path):
    mesh = init_device_mesh("cpu", mesh_shape)
    parameters = {name: nn.Parameter(place(value, mesh)) for name, value in full_tensors(0).items()}
    optimizer = build(variant, parameters)
    for step in range(1, 4):
        for name, grad in full_tensors(step).items():
            parameters[name].grad = place(grad, mesh)
        optimizer.step()
    checkpointer = Checkpointer(folder, async_save=False)
    checkpointer.save(3, parameters | optimizer.state_tensors(), {})
    checkpointer.close()
    return whole(parameters | optimizer.state_tensors())


def load(rank: int, world_size: int, mesh_shape: tuple[int, ...], variant: str, folder: Path):
    """Load, compare, and go on to the last step."""
    mesh = init_device_mesh("cpu", mesh_shape)
    parameters = {name: nn.Parameter(place(torch.zeros(shape), mesh)) for name, shape in SHAPES.items()}
    optimizer = build(variant, parameters)
    checkpointer = Checkpointer(folder)
    shapes = {name: entry.shape for name, entry in checkpointer.read_manifest(3).tensors.items()}
    with optimizer.loading(shapes) as state:
        checkpointer.load(3, {name: parameter.detach() for name, parameter in parameters.items()} | state)
    checkpointer.close()
    loaded = whole(parameters | optimizer.state_tensors())
    for step in range(4, STEPS + 1):
        for name, grad in full_tensors(step).items():
            parameters[name].grad = place(grad, mesh)
        optimizer.step()
    return loaded, whole(parameters | optimizer.state_tensors())


@pytest.mark.parametrize("variant", ["default", "paper", "peaks"])
def test_a_checkpoint_of_two_ranks_loads_anywhere(variant: str, tmp_path):
    saved = run_ranks(2, save, (2,), variant, tmp_path)[0]
    assert saved["even.codes"].dtype == torch.uint8
    expected = train_alone(variant)
    for world_size, mesh_shape in ((1, (1,)), (3, (3,)), (4, (2, 2)), (2, (2, 1))):
        for loaded, later in run_ranks(world_size, load, mesh_shape, variant, tmp_path):
            assert_same(loaded, saved, f"loaded on {mesh_shape}")
            assert_same(later, expected, f"trained on on {mesh_shape}")


def load_damaged(rank: int, world_size: int, folder: Path):
    mesh = init_device_mesh("cpu", (world_size,))
    parameters = {name: nn.Parameter(place(value, mesh)) for name, value in full_tensors(0).items()}
    optimizer = build("paper", parameters)
    for step in range(1, 3):
        for name, grad in full_tensors(step).items():
            parameters[name].grad = place(grad, mesh)
        optimizer.step()
    before = whole(parameters | optimizer.state_tensors())
    checkpointer = Checkpointer(folder)
    shapes = {name: entry.shape for name, entry in checkpointer.read_manifest(3).tensors.items()}
    message = ""
    try:
        with optimizer.loading(shapes) as state:
            checkpointer.load(3, {name: parameter.detach() for name, parameter in parameters.items()} | state)
    except ValueError as error:
        message = str(error)
    checkpointer.close()
    assert_same(whole(parameters | optimizer.state_tensors()), before, "after the refusal")
    return message


def save_without(rank: int, world_size: int, missing: str, folder: Path):
    mesh = init_device_mesh("cpu", (world_size,))
    parameters = {name: nn.Parameter(place(value, mesh)) for name, value in full_tensors(0).items()}
    optimizer = build("paper", parameters)
    for name, grad in full_tensors(3).items():
        parameters[name].grad = place(grad, mesh)
    optimizer.step()
    tensors = parameters | optimizer.state_tensors()
    del tensors[missing]
    checkpointer = Checkpointer(folder, async_save=False)
    checkpointer.save(3, tensors, {})
    checkpointer.close()


@pytest.mark.parametrize(
    "missing", ["even.codes", "uneven.scale", "even.v", "codebook.levels", "vector.m", "even.period"]
)
def test_a_checkpoint_with_a_piece_missing_is_refused_before_anything_changes(missing: str, tmp_path):
    run_ranks(2, save_without, missing, tmp_path)
    for message in run_ranks(2, load_damaged, tmp_path):
        assert missing in message and "lacks" in message
