"""Tokens/s of a run on devices that are not there: an ESTIMATE, from data sheets, by a roofline and ring collectives.

What is counted, and what is assumed:

* Matrix products as the run executes them: forward, gradients of inputs and weights (of a projected layer those of B
  only), the attention of half a square, and what activation checkpointing runs again (``full``: every block,
  ``selective``: half of its products). They run at the peak times the share that large products reach.
* Bytes of everything else that a block and the loss read and write, and of the optimizer's step, at the memory's
  bandwidth. A product and such an operation do not run at one time.
* Collectives move (W - 1) / W of their bytes (twice that for an all-reduce) at the bandwidth of the slowest link of
  their ring, and wait once for every hop, by the latencies of NCCL's own tuning table. They hide behind computation
  but for those of one unit of the model.

Left out: the host, the loader, checkpoints, evaluation, stragglers. Real runs are slower; what a plan is for is which
choice is faster, and whether the network or the device limits it.
"""

from dataclasses import dataclass

import torch
from torch import nn

from conf.schema import Config, ParallelConfig
from memopt import subspace
from memopt.plan_settings import Device
from models.counts import flops_per_token
from observe import mfu

# seconds: NCCL, src/graph/tuning.cc, ring, simple protocol: of a call, of a hop within a node, of one between nodes
BASE_LATENCY, LINK_LATENCY, NETWORK_LATENCY = 8.4e-6, 3.4e-6, 9.6e-6
# an attention kernel that keeps no scores computes one of its two products again: 5 in backward instead of 4
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Work:
    """What a token and a pass over the model cost, whatever the device and the number of ranks."""

    products: float
    """FLOPs a token of matrix products of the blocks, forward."""
    attention: float
    """FLOPs a token of attention, forward."""
    head: float
    """FLOPs a token of the head, forward."""
    weight_gradients: float
    """FLOPs a token of the gradients of weights."""
    traffic: float
    """Bytes a token that a forward pass of the blocks reads and writes beside matrix products."""
    head_traffic: float
    """Bytes a token that the loss reads and writes, its gradients included."""
    gathered: int
    """Bytes that all ranks together gather for one pass over the model."""
    reduced: int
    """Bytes of all gradients as they are reduced, fp32."""
    units: int
    """Parts of the model that are gathered by themselves."""
    model_flops: int
    """FLOPs a token by the convention of MFU."""


@dataclass(frozen=True)
class Pace:
    """Estimated speed at one number of ranks."""

    tokens_per_second_per_device: float
    mfu: float
    limit: str
    """What takes most of a step: "compute", "memory bandwidth" or "network"."""
    step_seconds: float


def work_of(config: Config, model: nn.Module, dtype: torch.dtype) -> Work:
    """The work of ``model``, on the meta device, sharded or not, in matrix products of ``dtype``."""
    shape, size = config.model, dtype.itemsize
    head = 2.0 * shape.vocab_size * shape.dim
    attention = 2.0 * shape.layers * config.train.seq_len * shape.dim
    forward = flops_per_token(shape, config.train.seq_len) / 3
    named = dict(model.named_parameters())
    # tables that are looked up cost no product; a tied one is the head too
    looked_up = [name for name in named if "positions" in name or ("tok_embeddings" in name and not shape.tied)]
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    matrices = sum(p.numel() for name, p in trained.items() if p.ndim == 2 and name not in looked_up)
    kv = shape.dim // shape.heads * (shape.kv_heads or shape.heads)
    if shape.family == "llama3":
        # two norms and two residual sums, rotary positions of queries and keys, silu and the product with its gate
        moved = 10 * shape.dim + 2 * (shape.dim + kv) + 5 * shape.hidden
    else:
        # two norms, two residual sums, biases and GELU
        moved = 10 * shape.dim + 2 * (2 * shape.dim + 2 * kv) + 4 * shape.hidden
    return Work(
        products=forward - head - attention,
        attention=attention,
        head=head,
        weight_gradients=2.0 * matrices,
        traffic=float(shape.layers * moved * size),
        # passes of models.loss over a chunk of logits: four in the type of the products, eight in fp32
        head_traffic=float(shape.vocab_size * (4 * size + 32)),
        gathered=size * sum(p.numel() for name, p in named.items() if not subspace.is_subspace(name)),
        reduced=4 * sum(parameter.numel() for parameter in trained.values()),
        units=shape.layers + 2,
        model_flops=flops_per_token(shape, config.train.seq_len),
    )


def pace(
    work: Work, config: Config, device: Device, world: int, rows: int, policy: str, held_bytes: int
) -> Pace | None:
    """Estimated speed; None where a figure of the device is unknown.

    Args:
        work: of the model.
        config: of the run.
        device: of every rank.
        world: ranks.
        rows: sequences of a microbatch.
        policy: activation checkpointing.
        held_bytes: of parameters, gradients and state of a rank: an optimizer's step reads and writes them.
    """
    peak = mfu.device_peak(device.driver_name)
    figures = (peak, device.attainable, device.memory_bandwidth, device.link_bandwidth, device.network_bandwidth)
    if config.train.precision == "fp32" or None in figures:
        return None
    assert peak is not None and device.attainable is not None and device.memory_bandwidth is not None
    batch = config.train.global_batch // world
    microbatches = -(-batch // rows)
    tokens = batch / microbatches * config.train.seq_len
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[policy]
    rate, bandwidth = peak * device.attainable, device.memory_bandwidth
    forward = tokens * (work.products + work.attention + work.head) / rate
    products = again * work.products + (work.attention if policy == "full" else 0.0)
    backward = tokens * (products + work.products + work.head + ATTENTION_BACKWARD * work.attention) / rate
    backward += tokens * work.weight_gradients / rate
    forward_bytes = tokens * (work.traffic + work.head_traffic) / bandwidth
    backward_bytes = tokens * (2.0 + (1.0 if policy == "full" else 0.0)) * work.traffic / bandwidth
    network = _Network(config.parallel, device, world, work)
    first, second = forward + forward_bytes, backward + backward_bytes
    exposed = (network.gather + network.reduce) / work.units
    reductions = microbatches if network.every else 1
    step = microbatches * max(first, network.gather)
    step += reductions * max(second, network.gather_again + network.reduce)
    step += (microbatches - reductions) * max(second, network.gather_again)
    # the reduction over replicas hides behind the last backward, which has its own already
    step += max(0.0, network.all_reduce - second) + network.update + microbatches * exposed
    optimizer = 3.0 * held_bytes / bandwidth
    step += optimizer
    shares = {
        "compute": microbatches * (forward + backward),
        "memory bandwidth": microbatches * (forward_bytes + backward_bytes) + optimizer,
    }
    # the rest of a step is what the network does not hide
    shares["network"] = step - sum(shares.values())
    speed = batch * config.train.seq_len / step
    used = mfu.utilisation(speed, work.model_flops, peak)
    assert used is not None
    return Pace(speed, used, max(shares, key=lambda name: shares[name]), step)


def ring_seconds(device: Device, sent: float, ranks: int, nodes: int, each: int, passes: int = 1) -> float:
    """Seconds of an all-gather or reduce-scatter of ``sent`` bytes in all; of an all-reduce with ``passes`` 2.

    Args:
        device: has the bandwidths; they must be known.
        sent: bytes of the whole tensor.
        ranks: members of the ring.
        nodes: nodes that it passes.
        each: members of it in a node: so many adapters carry it.
        passes: times that the tensor goes round.
    """
    if ranks == 1:
        return 0.0
    assert device.link_bandwidth is not None and device.network_bandwidth is not None
    bandwidth = device.link_bandwidth if each > 1 else device.network_bandwidth
    if nodes > 1:
        bandwidth = min(bandwidth, each * device.network_bandwidth)
    hops = (ranks - nodes) * LINK_LATENCY + (nodes - 1) * NETWORK_LATENCY
    return passes * ((ranks - 1) / ranks * sent / bandwidth + hops) + BASE_LATENCY


class _Network:
    """Seconds of the collectives of a pass and of a step."""

    def __init__(self, config: ParallelConfig, device: Device, world: int, work: Work) -> None:
        shard = {"fsdp": world, "ddp": 1}.get(config.mode, config.shard or 1)
        replicas = world // shard
        each = min(shard, device.devices_per_node, world)
        shard_nodes = -(-shard // device.devices_per_node)
        # members of one ring over replicas are `shard` ranks apart
        apart = max(1, min(device.devices_per_node, world) // shard)
        self.every = config.reduce == "every" or (config.reduce == "auto" and config.mode != "ddp")

        def by_unit(sent: float, ranks: int, nodes: int, members: int, passes: int = 1) -> float:
            return work.units * ring_seconds(device, sent / work.units, ranks, nodes, members, passes)

        self.gather = by_unit(work.gathered, shard, shard_nodes, each)
        self.gather_again = self.gather if config.reshard else 0.0
        self.reduce = by_unit(work.reduced, shard, shard_nodes, each)
        part, nodes = work.reduced / shard, -(-replicas // apart)
        self.all_reduce = by_unit(part, replicas, nodes, min(apart, replicas), 2)
        self.update = ring_seconds(device, part, replicas, nodes, min(apart, replicas))
