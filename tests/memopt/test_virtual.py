"""Background: B of a projected layer is 0 whenever it is read, and exists to have a gradient. Left as it is, it would
take memory, and FSDP2 would send it around in every forward pass; a parameter whose memory is taken away behind DDP's
or FSDP2's back may get a wrong gradient or none. The widths give even, uneven and empty shards at 2, 3 and 4 ranks."""

import warnings

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from memopt import virtual
from memopt.rso import RSO
from memopt.subspace import SubspaceLinear
from tests.spawn import run_ranks

LAYOUTS = [(1, (1,)), (2, (2,)), (2, (2, 1)), (3, (3,)), (3, (3, 1)), (4, (4,)), (4, (4, 1)), (4, (2, 2))]
RANK = 2
STEPS = 3
LR = 0.01
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def build() -> nn.Sequential:
    """Rows 7 (uneven), 1 (empty shards), 12 (even); the last layer stays dense."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1), nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12, bias=False),
        nn.LayerNorm(12), nn.Linear(12, 3),
    )  # fmt: skip
    RSO.convert(model, rank=RANK, layers=["0", "2", "5"], projection="coordinate")
    return model


def subspaces(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: layer.subspace for name, layer in model.named_modules() if isinstance(layer, SubspaceLinear)}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_released(model: nn.Module) -> None:
    for name, b in subspaces(model).items():
        rows = local(b)
        assert rows.untyped_storage().nbytes() == rows.element_size(), name
        assert not rows.any() and rows.shape[1] == RANK, name


def batch(step: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, rank: int, world_size: int, factor: float = 1.0, module: nn.Module | None = None):
    """Gradients of every step of two microbatches and the last weights, from this rank's rows of the batch.

    ``factor``: of the loss, for a sum of gradients where the wrapper takes their mean.
    """
    module = module or model
    optimizer = RSO(module, LR, interval=2)
    found = []
    for step in range(STEPS):
        assert_released(module)
        optimizer.zero_grad()
        for last, part in enumerate(batch(step)[rank::world_size].chunk(2)):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(bool(last))
            (model(part).square().sum() * factor).backward()
        grads = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
        assert all(grad is not None for grad in grads.values()) and "0.weight" not in grads
        found.append({name: whole(grad) for name, grad in grads.items()})
        optimizer.step()
    assert_released(module)
    weights = {name: whole(parameter) for name, parameter in module.named_parameters()}
    return found, weights


def test_a_released_parameter_is_one_zero():
    model = build()
    parameters = list(model.parameters())
    chosen = list(subspaces(model).values())
    shapes = [b.shape for b in chosen]
    virtual.release(model, chosen)
    assert_released(model)
    assert all(first is second for first, second in zip(parameters, model.parameters(), strict=True))
    assert [b.shape for b in chosen] == shapes == [(7, RANK), (1, RANK), (12, RANK)]
    assert all(isinstance(b, nn.Parameter) and b.requires_grad and b.dtype == torch.float32 for b in chosen)
    model(batch(0)).sum().backward()
    assert all(b.grad.shape == b.shape and b.grad.is_contiguous() for b in chosen)


def test_held_gives_memory_for_a_while():
    model = build()
    chosen = list(subspaces(model).values())
    virtual.release(model, chosen)
    with virtual.held(chosen[:2]):
        for b in chosen[:2]:
            assert b.untyped_storage().nbytes() == b.numel() * 4 and not b.any()
            b.detach().add_(1.0)
            assert bool((b == 1).all())
        assert chosen[2].untyped_storage().nbytes() == 4
    assert_released(model)
    with pytest.raises(RuntimeError, match="in the middle"), virtual.held(chosen):
        chosen[0].detach().add_(1.0)
        raise RuntimeError("in the middle")
    assert_released(model)
    with virtual.held(chosen):
        assert not any(b.any() for b in chosen)


def test_a_state_dict_goes_back_into_a_model_that_trains():
    model = build()
    optimizer = RSO(model, LR)
    model(batch(0)).sum().backward()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer.step()
    assert not torch.equal(model[0].weight, saved["0.weight"])
    model.load_state_dict(saved)
    assert torch.equal(model[0].weight, saved["0.weight"])
    assert_released(model)


class Wire:
    """Counts elements that this rank gives to collectives, by name of the function."""

    NAMES = ("all_gather_single", "reduce_scatter_single")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[str, list[int]] = {name: [] for name in self.NAMES}
        for name in self.NAMES:
            monkeypatch.setattr(torch.distributed, name, self._counted(name, getattr(torch.distributed, name)))

    def _counted(self, name: str, function):
        def call(*args, **kwargs):
            tensor = kwargs["input"] if "input" in kwargs else args[1]
            self.sent[name].append(tensor.numel())
            return function(*args, **kwargs)

        return call


def shard(model: nn.Sequential, mesh, **options) -> None:
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no mean
            module.set_force_sum_reduction_for_comms(True)


def padded(shape: torch.Size, ranks: int) -> int:
    """Elements of the largest shard."""
    return -(-shape[0] // ranks) * shape[1:].numel()


def train_fsdp(rank: int, world_size: int, mesh_shape: tuple[int, ...], options: dict):
    model = build()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    shard(model, mesh, **options)
    gathered_as = set()
    model[0].register_forward_pre_hook(lambda layer, _: gathered_as.add((layer.subspace.shape, layer.subspace.dtype)))
    with pytest.MonkeyPatch.context() as patch:
        # of the forward and backward pass: the optimizer gathers by itself
        step = RSO.step
        wire = Wire(patch)
        patch.setattr(RSO, "step", lambda self: without_wire(step, self, wire))
        result = train(model, rank, world_size, factor=world_size)
    ranks = mesh_shape[-1]
    units = {name.split(".")[0] for name in shapes}
    gathered = {unit: 0 for unit in units}
    reduced = {unit: 0 for unit in units}
    for name, shape in shapes.items():
        unit = name.split(".")[0]
        gathered[unit] += 0 if name.endswith("subspace") else padded(shape, ranks)
        reduced[unit] += ranks * padded(shape, ranks) if name in trainable else 0
    policy = options.get("mp_policy", MixedPrecisionPolicy())
    assert gathered_as == {(torch.Size([7, RANK]), policy.param_dtype or torch.float32)}
    return result, wire.sent, set(gathered.values()), sum(reduced.values())


def without_wire(step, optimizer: RSO, wire: Wire) -> None:
    before = {name: list(sent) for name, sent in wire.sent.items()}
    step(optimizer)
    wire.sent.update(before)


@pytest.fixture(scope="module")
def alone():
    """Gradients and weights of one process with the whole batch."""
    return train(build(), 0, 1)


def assert_close(found, expected, where: str) -> None:
    for step, (grads, wanted) in enumerate(zip(found[0], expected[0], strict=True)):
        assert grads.keys() == wanted.keys()
        for name, grad in wanted.items():
            torch.testing.assert_close(grads[name], grad, **CLOSE, msg=f"{where}, step {step}: gradient of {name}")
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, **CLOSE, msg=f"{where}: {name}")


@pytest.mark.parametrize("world_size, mesh_shape", LAYOUTS)
def test_fsdp_reduces_b_and_does_not_gather_it(world_size: int, mesh_shape: tuple[int, ...], alone):
    # units stay gathered after the forward pass on some
    options = {"reshard_after_forward": world_size != 3}
    results = run_ranks(world_size, train_fsdp, mesh_shape, options)
    for rank, (found, sent, gathered, reduced) in enumerate(results):
        assert_close(found, alone, f"rank {rank}")
        if mesh_shape[-1] == 1:
            # nothing is sharded
            assert sent["all_gather_single"] == []
        else:
            assert set(sent["all_gather_single"]) == gathered
            # gradients of what trains alone, once a step
            assert sum(sent["reduce_scatter_single"]) == STEPS * reduced


@pytest.mark.parametrize("world_size", [1, 2])
def test_mixed_precision_of_fsdp(world_size: int, alone):
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for (grads, _), sent, gathered, _ in run_ranks(world_size, train_fsdp, (world_size,), options):
        assert world_size == 1 or set(sent["all_gather_single"]) == gathered
        for name, grad in alone[0][0].items():
            assert grads[0][name].dtype == torch.float32
            error = (grads[0][name] - grad).norm() / grad.norm()
            assert 0 < error < 0.03, name


def train_ddp(rank: int, world_size: int, as_view: bool):
    model = build()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    with warnings.catch_warnings():
        # such as of gradients whose layout is not that of the bucket
        warnings.simplefilter("error")
        return train(wrapped, rank, world_size, factor=world_size, module=model)


@pytest.mark.parametrize("world_size, as_view", [(1, False), (2, True), (3, False)])
def test_ddp_reduces_b(world_size: int, as_view: bool, alone):
    for rank, found in enumerate(run_ranks(world_size, train_ddp, as_view)):
        assert_close(found, alone, f"rank {rank}")
