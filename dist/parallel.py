"""Mesh, sharding, activation checkpointing and compilation of a model, and when its gradients are reduced.

DDP, HSDP and FSDP are one code path: torchtitan's FSDP2 application on a mesh ("dp_replicate", "fsdp") of (W, 1) or
(W / shard, shard), or ("fsdp",) of (W,). Gradients are summed, never averaged: the loss is already divided by the
global number of tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

import conf.titan  # noqa: F401  (first: it makes torchtitan importable on this machine)
from conf.schema import ParallelConfig

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # isort: skip
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder  # isort: skip


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
    if activation_checkpoint != "none":
        policy = FullAC if activation_checkpoint == "full" else SelectiveAC
        policy.Config().build(dump_folder="").apply(model)
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
