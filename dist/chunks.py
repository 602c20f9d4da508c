"""Which part of which tensor a rank writes into a checkpoint.

Decided here: every chunk is written by exactly one of the ranks that hold it, spread by bytes, and this rank copies
nothing else; a tensor that its ranks hold differently is refused. A DTensor brings its own places; a plain tensor is
either held alike by several ranks (checked by value: torch would keep one rank's copy in silence) or by one alone.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard

from dist import agree
from dist.manifest import TensorEntry, plain_problem

Chunk = tuple[ChunkStorageMetadata, torch.Size, torch.Tensor]


@dataclass(frozen=True)
class Holding:
    """How a rank holds one tensor, without its values."""

    dtype: str
    shape: tuple[int, ...]
    """Global shape."""
    itemsize: int
    """Bytes per entry."""
    replicas: int
    """Copies of each chunk among the ranks of the mesh; 0 for a plain tensor, whose copies are found by its name."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def describe(tensors: dict[str, torch.Tensor]) -> dict[str, Holding]:
    """How this rank holds each tensor.

    Raises:
        ValueError: a tensor has no values (meta), or a placement that is neither Shard nor Replicate.
    """
    holdings = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values to save. Initialise it first.")
        replicas = 0
        if isinstance(tensor, DTensor):
            wrong = [str(placement) for placement in tensor.placements if type(placement) not in (Shard, Replicate)]
            if wrong:
                raise ValueError(f"{name} is placed {', '.join(wrong)}; a checkpoint takes Shard and Replicate only.")
            replicas = math.prod(tensor.device_mesh.size(axis) for axis in _replicate_axes(tensor))
        holdings[name] = Holding(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.element_size(), replicas)
    return holdings


def plain_digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Name -> SHA-256 of the values, of the plain tensors."""
    digests = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digests[name] = hashlib.sha256(flat.numpy().data).hexdigest()
    return digests


def merge(holdings_by_rank: list[dict[str, Holding]]) -> dict[str, TensorEntry]:
    """The whole checkpoint's tensors, by name.

    Raises:
        ValueError: a tensor is not held alike by its ranks, or a DTensor is missing on a rank.
    """
    merged: dict[str, Holding] = {}
    for rank, holdings in enumerate(holdings_by_rank):
        for name, holding in holdings.items():
            first = merged.setdefault(name, holding)
            if first != holding:
                raise ValueError(f"{name} differs between ranks: {first} on a lower rank, {holding} on rank {rank}.")
    for name, holding in merged.items():
        missing = [rank for rank, holdings in enumerate(holdings_by_rank) if name not in holdings]
        if holding.replicas and missing:
            raise ValueError(f"{name} is sharded but missing on ranks {missing}: every rank must pass it.")
    return {name: TensorEntry(held.dtype, list(held.shape)) for name, held in sorted(merged.items())}


def differing(digests_by_rank: list[dict[str, str]]) -> list[str]:
    """Names of the plain tensors whose values are not the same on all ranks that hold them."""
    seen: dict[str, set[str]] = {}
    for digests in digests_by_rank:
        for name, digest in digests.items():
            seen.setdefault(name, set()).add(digest)
    return sorted(name for name, values in seen.items() if len(values) > 1)


def assign(holdings_by_rank: list[dict[str, Holding]]) -> dict[str, int]:
    """Name -> which copy is written: the replica's index for a DTensor, the rank for a plain tensor.

    The largest tensors are dealt out first, each to the copy with the fewest bytes so far. Every rank gets the same
    answer from the same ``holdings_by_rank``.
    """
    loads: dict[int, list[int]] = {0: [0] * len(holdings_by_rank)}
    everything = {name: holding for holdings in holdings_by_rank for name, holding in holdings.items()}
    owners = {}
    for name, holding in sorted(everything.items(), key=lambda item: (-item[1].num_bytes, item[0])):
        load = loads.setdefault(holding.replicas, [0] * holding.replicas)
        copies = list(range(holding.replicas))
        if not holding.replicas:
            copies = [rank for rank, holdings in enumerate(holdings_by_rank) if name in holdings]
        owners[name] = min(copies, key=load.__getitem__)
        load[owners[name]] += holding.num_bytes
    return owners


def owned_chunks(tensors: dict[str, torch.Tensor], owners: dict[str, int]) -> dict[str, Chunk]:
    """Name -> place, global shape and local values of the chunks that this rank writes. Values are not copied."""
    rank = torch.distributed.get_rank()
    chunks = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            mine = _replica_index(tensor) == owners[name]
            place = tensor.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]
            values = tensor.to_local().detach()
        else:
            mine = owners[name] == rank
            place = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.shape)
            values = tensor.detach()
        # an empty shard is nothing to write, unless the whole tensor is empty and only its name and shape are kept
        if mine and (values.numel() > 0 or tensor.numel() == 0):
            chunks[name] = (place, tensor.shape, values)
    return chunks


class Proposal:
    """What this rank brings to a save, checked as far as one rank can."""

    def __init__(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        if problem := plain_problem(meta):
            raise ValueError(f"the checkpoint's {problem}.")
        self.meta_text = json.dumps(meta, sort_keys=True)
        self.holdings = describe(tensors)
        # one rank alone has nothing to compare with
        self.plain = plain_digests(tensors) if torch.distributed.get_world_size() > 1 else {}
        self.signature = hashlib.sha256(repr(sorted(self.holdings.items())).encode()).hexdigest()


class Assignment:
    """Who writes what: worked out once, and again when any rank's tensors have other names, shapes or dtypes."""

    def __init__(self) -> None:
        self._signatures: list[str] = []
        self._entries: dict[str, TensorEntry] = {}
        self._owners: dict[str, int] = {}

    def update(self, proposal: Proposal, what: str) -> tuple[dict[str, TensorEntry], dict[str, int]]:
        """The tensor index and the owners; collective. Raises AgreedError where ranks contradict each other."""
        brought = agree.gather((proposal.signature, proposal.plain, proposal.meta_text))
        agree.together(lambda: _refuse_contradictions(brought), what)
        signatures = [signature for signature, _, _ in brought]
        if signatures != self._signatures:
            by_rank = agree.gather(proposal.holdings)
            self._entries = agree.together(lambda: merge(by_rank), what)
            self._owners = assign(by_rank)
            self._signatures = signatures
        return self._entries, self._owners


def _refuse_contradictions(brought: list[tuple[str, dict[str, str], str]]) -> None:
    if names := differing([plain for _, plain, _ in brought]):
        raise ValueError(
            f"plain tensors with one name and different values on different ranks: {', '.join(names)}. Make them "
            "DTensors, or give each rank's its own name."
        )
    if len({meta_text for _, _, meta_text in brought}) > 1:
        raise ValueError("the checkpoint's meta differs between ranks; all must pass the same values.")


def _replicate_axes(tensor: DTensor) -> list[int]:
    return [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]


def _replica_index(tensor: DTensor) -> int:
    """This rank's place among the copies of its chunk, counted over the replicated mesh axes."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "the mesh of a saved tensor holds every rank"
    index = 0
    for axis in _replicate_axes(tensor):
        index = index * tensor.device_mesh.size(axis) + coordinate[axis]
    return index
