"""A backward that fails must not leave the model in a state in which gradients stay on their rank.

Background: a flag that says "do not reduce yet" and survives an exception lets every later step train each rank on its
own data alone, which shows nowhere but in the loss. Which microbatches reduce is compared with one process in
``tests/test_trajectory.py``.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor

from conf.schema import ParallelConfig
from dist import parallel
from dist.reduce import local
from models.build import build_model
from models.init import init_weights
from models.names import named_parameters
from tests.models.shapes import CPU, LLAMA3, batch
from tests.spawn import run_ranks


def gradients_around_errors(rank: int, world_size: int, config: ParallelConfig) -> list[dict[str, torch.Tensor]]:
    """This rank's gradients before and after an error within each kind of microbatch and within an evaluation."""
    model = build_model(LLAMA3, 24, "cpu")
    mesh = parallel.build_mesh(config, world_size, "cpu")
    parallel.apply_parallel(model, mesh, config, compute_dtype=torch.float32)
    init_weights(model, 0, CPU)
    tokens, labels = (rows.tensor_split(world_size)[rank] for rows in batch())

    def gradients() -> dict[str, torch.Tensor]:
        model(tokens, labels).backward()
        found = {name: local(parameter.grad).clone() for name, parameter in named_parameters(model).items()}
        model.zero_grad()
        return found

    results = [gradients()]
    for last, every in ((False, False), (False, True), (True, False)):
        with pytest.raises(RuntimeError), parallel.gradient_sync(model, last=last, every=every):
            model(tokens, labels)
            raise RuntimeError
        results.append(gradients())
    with pytest.raises(RuntimeError), parallel.evaluation(model):
        model(tokens, labels)
        raise RuntimeError
    assert model.training and torch.is_grad_enabled()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "left gathered"
    return [*results, gradients()]


@pytest.mark.parametrize("config", [ParallelConfig(mode="ddp"), ParallelConfig(mode="fsdp")], ids=["ddp", "fsdp"])
def test_an_error_leaves_the_model_reducing_its_gradients(config: ParallelConfig):
    for first, *others in run_ranks(2, gradients_around_errors, config):
        assert all(torch.equal(other[name], gradient) for other in others for name, gradient in first.items())


def gradients_by_policy(rank: int, world_size: int, config: ParallelConfig):
    """What each policy keeps for backward and the gradients it gives, one model switched over and fresh ones."""
    tokens, labels = (rows.tensor_split(world_size)[rank] for rows in batch())

    def build(policy: str):
        model = build_model(LLAMA3, 24, "cpu")
        mesh = parallel.build_mesh(config, world_size, "cpu")
        parallel.apply_parallel(model, mesh, config, compute_dtype=torch.float32, activation_checkpoint=policy)
        init_weights(model, 0, CPU)
        return model

    def run(model):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes) or tensor, lambda t: t):
            loss = model(tokens, labels)
        loss.backward()
        found = {name: local(parameter.grad).clone() for name, parameter in named_parameters(model).items()}
        model.zero_grad()
        return sum(kept), found

    switched = build("auto")
    results = []
    for policy in ("full", "none", "selective", "none"):
        parallel.set_recomputation(switched, policy)
        results.append((policy, run(switched), run(build(policy))))
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_recomputation_can_be_switched_between_steps(world_size: int):
    for results in run_ranks(world_size, gradients_by_policy, ParallelConfig(mode="fsdp")):
        kept = {}
        for policy, (found_bytes, found), (expected_bytes, expected) in results:
            kept[policy] = expected_bytes
            assert found_bytes == expected_bytes
            assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
        assert kept["full"] < kept["none"]
