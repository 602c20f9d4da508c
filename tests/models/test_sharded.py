"""torchtitan's FSDP and activation checkpointing on our models: the same losses and gradients as one process.

Background: ``apply_fsdp_to_decoder`` was written for torchtitan's own decoders. It must find every parameter of ours in
a unit, gather the head (which computes the loss) with the final norm, keep a tied matrix one parameter, and leave the
same gradients. 97 vocabulary rows and 32-wide layers on 3 ranks give uneven shards; a 1-row tensor gives empty ones.
"""

import functools

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from conf.schema import ModelConfig
from models.build import build_model
from models.decoder import LanguageModel
from models.init import init_weights
from models.names import canonical_name, named_parameters
from models.sample import sample
from tests.models.shapes import ALL, CPU, GPT2_DROPOUT, batch, built
from tests.spawn import run_ranks

CHECKPOINTING = {"none": None, "full": FullAC, "selective": SelectiveAC}


def checkpointed(model: LanguageModel, kind: str) -> LanguageModel:
    if CHECKPOINTING[kind] is not None:
        CHECKPOINTING[kind].Config().build().apply(model)
    return model


def sharded(
    config: ModelConfig, mesh_shape: tuple[int, ...], checkpointing: str = "none", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """The model on the meta device, checkpointed, wrapped by torchtitan and then given its weights."""
    model = checkpointed(build_model(config, 24, "cpu", loss_chunk=7), checkpointing)
    names = ("fsdp",) if len(mesh_shape) == 1 else ("dp_replicate", "fsdp")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    apply_fsdp_to_decoder(model, mesh, dtype, torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no scaled sum
            module.set_force_sum_reduction_for_comms(True)
    init_weights(model, 0, CPU)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def buffers_of(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {canonical_name(name): buffer for name, buffer in model.named_buffers()}


def gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: full(parameter.grad) for name, parameter in named_parameters(model).items()}


def two_microbatches(model: LanguageModel, tokens: torch.Tensor, labels: torch.Tensor, sync: bool = True) -> float:
    """Loss and gradients of a batch in two microbatches; with ``sync`` off, only the second reduces gradients."""
    half, total = tokens.shape[0] // 2, torch.zeros(())
    for index, rows in enumerate((slice(0, half), slice(half, None))):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(sync or index == 1)
        loss = model(tokens[rows], labels[rows])
        (loss / 100).backward()
        total += loss.detach()
    return total.item()


def rank_run(rank: int, world: int, key: str, mesh_shape: tuple[int, ...], checkpointing: str, sync: bool) -> dict:
    torch.manual_seed(0)
    model = sharded(ALL[key], mesh_shape, checkpointing)
    weights = {name: full(parameter) for name, parameter in named_parameters(model).items()}
    buffers = buffers_of(model)
    tokens, labels = (x.tensor_split(world)[rank] for x in batch())
    loss = two_microbatches(model, tokens, labels, sync)
    total = torch.tensor(loss)
    torch.distributed.all_reduce(total)
    plain = [name for name, parameter in named_parameters(model).items() if not isinstance(parameter, DTensor)]
    assert not plain, f"outside every FSDP unit: {plain}"
    return {"weights": weights, "buffers": buffers, "loss": total.item(), "grads": gradients(model)}


@functools.cache
def one_process(key: str) -> dict:
    model = built(ALL[key])
    weights = {name: full(parameter) for name, parameter in named_parameters(model).items()}
    loss = two_microbatches(model, *batch())
    return {"weights": weights, "buffers": buffers_of(model), "loss": loss, "grads": gradients(model)}


# mesh: one rank wrapped, FSDP even and uneven, replicas only (ddp), replicas of shards (hsdp)
@pytest.mark.parametrize(
    ("key", "mesh_shape", "checkpointing", "sync"),
    [
        ("llama3", (1,), "none", True),
        ("llama3", (2,), "none", True),
        ("llama3", (3,), "full", False),
        ("llama3", (2, 2), "selective", False),
        ("llama3_tied", (2,), "selective", True),
        ("llama3_tied", (3,), "none", False),
        ("gpt2", (2,), "full", False),
        ("gpt2", (3,), "selective", True),
        ("gpt2", (2, 1), "none", False),
    ],
)
def test_sharded_run_equals_one_process(key: str, mesh_shape: tuple[int, ...], checkpointing: str, sync: bool):
    expected = one_process(key)
    world = torch.Size(mesh_shape).numel()
    for result in run_ranks(world, rank_run, key, mesh_shape, checkpointing, sync):
        assert result["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            assert torch.equal(result["weights"][name], weight), f"{name} starts with other bits"
        assert result["buffers"].keys() == expected["buffers"].keys()
        for name, buffer in expected["buffers"].items():
            assert torch.equal(result["buffers"][name], buffer), f"{name} differs from one process"
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for name, gradient in expected["grads"].items():
            torch.testing.assert_close(result["grads"][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def rank_bf16(rank: int, world: int, key: str) -> dict:
    model = sharded(ALL[key], (world,), dtype=torch.bfloat16)
    tokens, labels = (x.tensor_split(world)[rank] for x in batch())
    loss = model(tokens, labels)
    assert loss.dtype == torch.float32
    loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return {"buffers": buffers_of(model), "loss": total.item(), "grads": gradients(model)}


@pytest.mark.parametrize("key", ["llama3", "gpt2"])
def test_bf16_compute_keeps_fp32_loss_gradients_and_rope(key: str):
    expected = one_process(key)
    for result in run_ranks(2, rank_bf16, key):
        for name, buffer in expected["buffers"].items():
            assert torch.equal(result["buffers"][name], buffer) and buffer.dtype == torch.complex64
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-3) and result["loss"] != expected["loss"]
        for name, gradient in expected["grads"].items():
            error = (result["grads"][name] / 100 - gradient).norm() / gradient.norm()
            assert result["grads"][name].dtype == torch.float32 and error < 0.03, f"{name}: {error:.2e}"


def trained(model: LanguageModel) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps of SGD with dropout drawn from one seed."""
    torch.manual_seed(5)
    losses = []
    for step in range(3):
        losses.append(two_microbatches(model, *batch(seed=step)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return losses, {name: full(parameter) for name, parameter in named_parameters(model).items()}


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("key", ["gpt2_dropout", "llama3_tied"])
def test_checkpointing_changes_no_bit(key: str, checkpointing: str):
    losses, weights = trained(built(ALL[key]))
    again, same = trained(checkpointed(built(ALL[key]), checkpointing))
    assert losses == again
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_dropout_is_drawn_and_off_in_evaluation():
    model = built(GPT2_DROPOUT)
    tokens, labels = batch()
    assert model(tokens, labels) != model(tokens, labels)
    model.eval()
    assert model(tokens, labels) == model(tokens, labels)


def rank_tied(rank: int, world: int) -> None:
    """Five AdamW steps; the tied pair must stay one parameter with one optimizer entry."""
    model = sharded(ALL["gpt2"], (world,))
    assert model.lm_head.weight is model.tok_embeddings.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, labels = (x.tensor_split(world)[rank] for x in batch())
    first = full(model.tok_embeddings.weight)
    for _ in range(5):
        two_microbatches(model, tokens, labels)
        optimizer.step()
        optimizer.zero_grad()
    model.reshard()
    for module in (model.tok_embeddings, model.lm_head):
        module.reshard()
    assert model.lm_head.weight is model.tok_embeddings.weight
    assert len(optimizer.state) == len(named_parameters(model)) == len(list(model.parameters()))
    head, embedding = full(model.lm_head.weight), full(model.tok_embeddings.weight)
    assert torch.equal(head, embedding) and not torch.equal(head, first)


def test_tied_matrix_stays_one_parameter():
    run_ranks(2, rank_tied)


def rank_sample(rank: int, world: int, key: str) -> list[int]:
    # ranks differ in their global random state on purpose
    torch.manual_seed(rank)
    model = sharded(ALL[key], (world,))
    ids = sample(model, [1, 2, 3], 30, seed=7)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "left gathered"
    return ids


@pytest.mark.parametrize("key", ["llama3", "gpt2"])
def test_sample_is_the_same_on_every_rank(key: str):
    expected = sample(built(ALL[key]), [1, 2, 3], 30, seed=7)
    assert run_ranks(2, rank_sample, key) == [expected, expected]
