"""Background: state laid out for one mesh loaded into another puts rows in wrong places without a word, gradients that
only some ranks have make replicas diverge, and a sum that DTensor has not made yet is not a gradient."""

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from memopt import Gefen
from tests.spawn import run_ranks


def parameter_on(shape: tuple[int, ...], layout: str) -> nn.Parameter:
    """The same values on ``fsdp`` (4,), ``hsdp`` (2, 2), ``ddp`` (4, 1), or plain."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if layout == "plain":
        return nn.Parameter(values)
    mesh_shape = {"fsdp": (4,), "hsdp": (2, 2), "ddp": (4, 1)}[layout]
    mesh = init_device_mesh("cpu", mesh_shape)
    return nn.Parameter(distribute_tensor(values, mesh, [Replicate(), Shard(0)][-len(mesh_shape) :]))


def stepped(parameter: nn.Parameter, optimizer: Gefen, seed: int) -> None:
    grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    if isinstance(parameter, DTensor):
        grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
    parameter.grad = grad
    optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def loaded(rank: int, world_size: int, before: str, after: str, rows: int):
    first = parameter_on((rows, 33), before)
    saved = Gefen([first], lr=0.1)
    stepped(first, saved, 1)
    second = parameter_on((rows, 33), after)
    optimizer = Gefen([second], lr=0.1)
    stepped(second, optimizer, 1)
    optimizer.load_state_dict(saved.state_dict())
    return [
        [whole(state[key]) for key in ("codes", "scale", "v")]
        for state in (saved.state[first], optimizer.state[second])
    ]


@pytest.mark.parametrize("rows", [16, 17, 3])
@pytest.mark.parametrize(
    "before, after", [("fsdp", "hsdp"), ("hsdp", "fsdp"), ("ddp", "plain"), ("plain", "hsdp"), ("ddp", "fsdp")]
)
def test_state_of_any_layout_loads_into_any(before: str, after: str, rows: int):
    for saved, mine in run_ranks(4, loaded, before, after, rows):
        assert all(torch.equal(first, second) for first, second in zip(saved, mine, strict=True))


def partly_present(rank: int, world_size: int, sparse: bool):
    parameters = [nn.Parameter(torch.ones(8, 8)) for _ in range(2)]
    optimizer = Gefen(parameters, process_group=torch.distributed.group.WORLD)
    if sparse:
        for parameter in parameters:
            parameter.grad = torch.ones(8, 8)
        if rank == 1:
            parameters[1].grad = torch.ones(8, 8).to_sparse()
    else:
        parameters[rank].grad = torch.ones(8, 8)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error), [parameter.detach().clone() for parameter in parameters]
    return "no error", []


def test_gradients_that_only_some_ranks_have_are_refused_on_all():
    for message, parameters in run_ranks(2, partly_present, False):
        assert "parameter 0 of group 0 has a gradient on 1 of 2 ranks" in message
        assert all(torch.equal(parameter, torch.ones(8, 8)) for parameter in parameters)
    for message, _ in run_ranks(2, partly_present, True):
        assert "the gradient of parameter 1 of group 0 is sparse" in message


def with_unreduced_gradient(rank: int, world_size: int):
    mesh = init_device_mesh("cpu", (world_size,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(6, 16), mesh, [Replicate()]))
    plain = nn.Parameter(torch.ones(6, 16))
    both = [Gefen([each]) for each in (parameter, plain)]
    parts = [torch.randn(6, 16, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    parameter.grad = DTensor.from_local(parts[rank], mesh, [Partial()])
    plain.grad = sum(parts[1:], parts[0])
    for optimizer in both:
        optimizer.step()
    return parameter.full_tensor().detach(), plain.detach()


def test_a_gradient_that_is_still_to_be_summed():
    for sharded, plain in run_ranks(2, with_unreduced_gradient):
        torch.testing.assert_close(sharded, plain, rtol=1e-6, atol=1e-7)


def on_two_meshes(rank: int, world_size: int):
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 8), init_device_mesh("cpu", (2,)), [Shard(0)]))
    plain = nn.Parameter(torch.ones(4, 8))
    optimizer = Gefen([sharded, plain])
    for parameter in (sharded, plain):
        parameter.grad = torch.ones_like(parameter)
    if rank == 0:
        sharded.grad.to_local()[0, 0] = float("nan")
    optimizer.step()
    return optimizer.gauges()["nonfinite_blocks"]


def test_a_block_left_alone_counts_once_on_any_meshes():
    assert run_ranks(2, on_two_meshes) == [1, 1]
