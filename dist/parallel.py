"""Mesh, sharding, activation checkpointing and compilation of a model, and when its gradients are reduced.

DDP, HSDP and FSDP are one code path: torchtitan's FSDP2 application on a mesh ("dp_replicate", "fsdp") of (W, 1) or
(W / shard, shard), or ("fsdp",) of (W,). Gradients are summed, never averaged: the loss is already divided by the
global number of tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

import conf.titan  # noqa: F401  (first: it makes torchtitan importable on this machine)
from conf.schema import ParallelConfig

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # isort: skip
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder  # isort: skip

_POLICIES = {"full": FullAC, "selective": SelectiveAC}


def build_mesh(config: ParallelConfig, world_size: int, device_type: str) -> DeviceMesh:
    """The data-parallel mesh: axes ("dp_replicate", "fsdp") under ddp and hsdp, ("fsdp",) under fsdp."""
    if config.mode == "fsdp":
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("fsdp",))
    shard = 1 if config.mode == "ddp" else config.shard
    assert shard is not None
    return init_device_mesh(device_type, (world_size // shard, shard), mesh_dim_names=("dp_replicate", "fsdp"))


def apply_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    *,
    compute_dtype: torch.dtype,
    activation_checkpoint: str = "none",
    compile_blocks: bool = False,
) -> None:
    """Wrap a model in place, in the order recomputation, compilation, sharding.

    ``model`` follows torchtitan's decoder protocol and is best on the meta device. Its parameters become fp32 DTensors
    that are gathered in ``compute_dtype`` and whose gradients are reduced in fp32. One process that computes in fp32
    is not sharded: FSDP2's bookkeeping would only slow it down.
    """
    if activation_checkpoint == "auto":
        _offer_recomputation(model)
    elif activation_checkpoint != "none":
        _POLICIES[activation_checkpoint].Config().build(dump_folder="").apply(model)
    if compile_blocks:
        for block in model.layers.values():  # type: ignore[operator]
            block.compile(fullgraph=True)
    if mesh.size() == 1 and compute_dtype == torch.float32:
        return
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy="default" if config.reshard else "never",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.device_type == "cpu":
            # gloo has no PREMUL_SUM, which FSDP2 would use to undo its division
            module.set_force_sum_reduction_for_comms(True)


def set_recomputation(model: nn.Module, policy: str) -> None:
    """From the next forward on recompute ``none``, ``selective`` or ``full``, in a model wrapped with ``auto``."""
    for block in model.layers.values():  # type: ignore[operator]
        block.checkpoint_fn = block.recomputations[policy]


def _offer_recomputation(model: nn.Module) -> None:
    # torchtitan's wrappers of one block differ in what they hand it to
    policies = {name: policy.Config().build(dump_folder="") for name, policy in _POLICIES.items()}
    blocks = dict(model.layers.items())  # type: ignore[operator, union-attr]
    policies["full"].apply(model)
    for name, wrapper in model.layers.items():  # type: ignore[operator, union-attr]
        selective = policies["selective"]._wrap_block(blocks[name], base_fqn=f"layers.{name}")
        wrapper.recomputations = {
            "none": _run,
            "selective": selective.checkpoint_fn,
            "full": wrapper.checkpoint_fn,
        }


def _run(block: nn.Module, *arguments: Any, **options: Any) -> Any:
    return block(*arguments, **options)


def reduces_every_microbatch(config: ParallelConfig) -> bool:
    """Resolve ``parallel.reduce``: under ddp whole gradients are held anyway, so one reduction a step is enough."""
    return config.reduce == "every" or (config.reduce == "auto" and config.mode != "ddp")


@contextmanager
def gradient_sync(model: nn.Module, *, last: bool, every: bool) -> Iterator[None]:
    """Reduce the gradients of this microbatch's backward if it is the ``last`` of the step or ``every`` one is.

    With ``every``, gradients are reduce-scattered each time, and all-reduced over "dp_replicate" in the last one only.
    On leaving, also by an exception, the model reduces again by default.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last or every)
    model.set_requires_all_reduce(last)
    try:
        yield
    finally:
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Forward passes without gradients or dropout; on leaving, the model is as training needs it.

    FSDP2 keeps the last units gathered after a forward and relies on a backward to free them. Without one they would
    stay, and whoever asks the model for its parameters, such as a checkpoint, would get plain copies.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
