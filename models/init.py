"""Initial weights: one seed gives the same bits for every world size, layout and device.

Decided here: the distribution of every parameter, and how it is drawn. A matrix is drawn in blocks of rows, each from
a counter-based generator keyed by (seed, canonical name, block), in fp32 on the CPU (numpy, whose normal variates do
not depend on the processor's vector width, as torch's do). A rank draws the blocks that touch its own rows and no
others, so the time falls with the number of ranks and nothing is sent. Buffers are rebuilt, never copied, since none
of them is saved.
"""

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.protocols.module import Module

from conf.schema import ModelConfig
from models.decoder import LanguageModel
from models.names import canonical_name, named_parameters

BLOCK_ELEMENTS = 1 << 18
"""Elements of a block of rows, about. Part of the definition of the weights: another value gives other weights."""


@dataclass(frozen=True)
class Normal:
    """Normal variates of mean 0, redrawn while farther than ``cutoff`` standard deviations from it."""

    std: float
    cutoff: float = float("inf")


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float


def init_weights(model: LanguageModel, seed: int, device: torch.device) -> None:
    """Give ``model`` memory on ``device`` if it has none, rebuild its buffers and fill every parameter.

    Works on plain parameters and on FSDP2's DTensors, before or after activation checkpointing and compile are
    applied, and again on a model that has weights. Raises ``ValueError`` if a parameter has no rule here or a buffer
    was not rebuilt, so that nothing is left as the allocator gave it.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model.to_empty(device=device)
        if model.enable_weight_tying:
            # to_empty makes a parameter per module. fsdp holds the one of tok_embeddings, the first of its unit
            model.lm_head.weight = model.tok_embeddings.weight
    _rebuild_buffers(model, device)
    jobs: list[Callable[[], None]] = []
    for name, parameter in named_parameters(model).items():
        match initial_values(model.settings, name):
            case Constant(value):
                with torch.no_grad():
                    parameter.fill_(value)
            case Normal() as values:
                jobs += _block_jobs(parameter, values, seed, name)
    # numpy draws without holding the interpreter's lock
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def initial_values(config: ModelConfig, name: str) -> Normal | Constant:
    """The distribution of the parameter ``name`` (canonical). Raises ``ValueError`` for a name without a rule.

    llama3 follows torchtitan: 0.02, output projections and gate products scaled by depth, the head dim**-0.5 cut at
    three deviations. Its embedding is the exception: 0.02 instead of 1, as in Hugging Face's Llama, in GPT-2 and in
    the runs of the GaLore paper; with 1 the first blocks hardly move the residual stream, and a tied head would start
    with logits of deviation sqrt(dim). gpt2 follows Radford et al.: 0.02, residual projections / sqrt(2 layers).
    """
    last = name.rpartition(".")[2]
    layer = re.match(r"layers\.(\d+)\.", name)
    if last == "subspace":
        # B of a layer that the optimizer projected
        return Constant(0.0)
    if re.search(r"(^|\.)(attention_norm|ffn_norm|norm)\.weight$", name):
        return Constant(1.0)
    if last == "bias" and config.family == "gpt2":
        return Constant(0.0)
    if name in ("tok_embeddings.weight", "tok_embeddings.positions.weight"):
        return Normal(0.02)
    if name == "lm_head.weight":
        return Normal(0.02) if config.family == "gpt2" else Normal(config.dim**-0.5, cutoff=3.0)
    if layer and name.endswith((".wqkv.weight", ".w1.weight")):
        return Normal(0.02)
    if layer and name.endswith((".wo.weight", ".w2.weight", ".w3.weight")):
        depth = int(layer[1]) + 1 if config.family == "llama3" else config.layers
        return Normal(0.02 / (2 * depth) ** 0.5)
    raise ValueError(f"{name} has no rule for its initial values. Add one to models.init.initial_values.")


def draw_rows(values: Normal, shape: tuple[int, ...], seed: int, name: str, block: int) -> np.ndarray:
    """Rows ``[block * R, (block + 1) * R)`` of the matrix ``name`` of ``shape``, fp32; R is ``block_rows(shape)``."""
    rows = min(block_rows(shape), shape[0] - block * block_rows(shape))
    digest = np.frombuffer(hashlib.sha256(name.encode()).digest(), np.uint32)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *digest.tolist(), block])))
    drawn = generator.standard_normal((rows, *shape[1:]), dtype=np.float32)
    if np.isfinite(values.cutoff):
        while (far := np.abs(drawn) > values.cutoff).any():
            drawn[far] = generator.standard_normal(int(far.sum()), dtype=np.float32)
    drawn *= np.float32(values.std)
    return drawn


def block_rows(shape: tuple[int, ...]) -> int:
    """Rows drawn by one generator: a function of the whole shape alone."""
    return max(1, BLOCK_ELEMENTS // int(np.prod(shape[1:])))


def _block_jobs(parameter: Tensor, values: Normal, seed: int, name: str) -> list[Callable[[], None]]:
    """One job per block of ``parameter`` that has rows on this rank; each writes its own rows."""
    first, local = 0, parameter.detach()
    if isinstance(local, DTensor):
        _, offset = compute_local_shape_and_global_offset(local.shape, local.device_mesh, local.placements)
        first, local = offset[0], local.to_local()
    shape = tuple(parameter.shape)
    if local.numel() == 0:
        return []
    assert tuple(local.shape[1:]) == shape[1:], f"{name} is sharded on a dimension other than 0"
    rows, last = block_rows(shape), first + local.shape[0]

    def fill(block: int) -> None:
        start, stop = max(first, block * rows), min(last, (block + 1) * rows)
        drawn = draw_rows(values, shape, seed, name, block)[start - block * rows : stop - block * rows]
        local[start - first : stop - first].copy_(torch.from_numpy(drawn))

    return [lambda block=block: fill(block) for block in range(first // rows, (last - 1) // rows + 1)]


def _rebuild_buffers(model: LanguageModel, device: torch.device) -> None:
    for prefix, module in model.named_modules():
        before = dict(module.named_buffers(recurse=False))
        if before and isinstance(module, Module):
            module._init_self_buffers(buffer_device=device)
        for name, old in before.items():
            new = getattr(module, name)
            if new is old or new.is_meta or new.dtype not in (torch.float32, torch.complex64):
                raise ValueError(
                    f"buffer {canonical_name(f'{prefix}.{name}')} ({new.dtype} on {new.device}) was not rebuilt in "
                    f"fp32. Let {type(module).__name__}._init_self_buffers make it anew."
                )


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Make dropout a function of (seed, step, rank): a resumed step draws what the unbroken run drew."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big") >> 1)
