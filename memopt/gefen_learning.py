"""What Gefen finds out from gradients: the period of each matrix, and the codebook. Collective; all ranks agree.

Each rank counts over the rows it owns, the counts are added up, then everyone decides alike. Ranks must pass the same
parameters in the same order; a rank may own no row of some.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from kernels.gefen import CELLS, HALF_CELLS, Codebook, Matrix
from memopt import layout, partition
from memopt.column_factor import column_factors
from memopt.gefen_state import Entry

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def grouped(values: Iterable[Value], key: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    """``values`` by their key, in the order of first appearance."""
    groups: dict[Key, list[Value]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


@torch.no_grad()
def found_periods(rule: str, entries: Sequence[Entry], grads: Mapping[Tensor, Tensor]) -> list[int | None]:
    """The period that ``rule`` ("paper" or "peaks") finds for each matrix; None where the gradient is all zero.

    Args:
        grads: parameter -> gradient of the rows this rank owns, (rows, C).
    """
    found: dict[Tensor, int | None] = {}
    for mesh, members in grouped(entries, lambda entry: entry.mesh).items():
        parts = [partition.statistics(rule, grads[entry.parameter]) for entry in members]
        summed = layout.sum_over_owners(torch.cat(parts), mesh).cpu()
        for entry, statistics in zip(members, torch.split(summed, [len(part) for part in parts]), strict=True):
            found[entry.parameter] = partition.choose(rule, entry.columns, entry.rows, statistics)
    return [found[entry.parameter] for entry in entries]


@torch.no_grad()
def counted_cells(pieces: Iterable[tuple[Entry, ModuleType, Matrix]]) -> Tensor:
    """How often the cells of [-1, 1] occur in the gradient relative to the largest of its block: (CELLS,) int64, CPU.

    Args:
        pieces: each matrix with its backend and what its step works on.
    """
    counts = torch.zeros(CELLS, dtype=torch.int64, device="cpu")
    for mesh, members in grouped(pieces, lambda piece: piece[0].mesh).items():
        own = torch.zeros(CELLS, dtype=torch.int64, device=members[0][2].grad.device)
        for backend, part in grouped(members, lambda piece: piece[1]).items():
            own += backend.code_histogram([matrix for _, _, matrix in part])
        counts += layout.sum_over_owners(own, mesh).cpu()
    return counts


@torch.no_grad()
def recode(codes: Tensor, old: Codebook, new: Codebook) -> None:
    """Rewrite ``codes`` (any shape, uint8, in place) of levels ``old`` as the nearest codes of ``new``."""
    cells = (old.levels * HALF_CELLS + (HALF_CELLS + 0.5)).to(torch.int64)
    codes.copy_(new.codes[cells][codes.int()])


@torch.no_grad()
def repartition(entry: Entry, period: int, codebook: Codebook) -> None:
    """Give a matrix another period; momentum and second moment of every entry stay what they were.

    v of a new block is the mean of v over its entries; codes are written anew, which rounds them once more.
    """
    columns = entry.columns
    # while it is undecided there is one block a row
    old = entry.period or columns
    local = dict(entry.local)
    factor = inverse = torch.ones((), dtype=torch.float32, device=local["v"].device)
    if entry.factored:
        factor, _ = column_factors(local["column"], [columns], [old])
        _, inverse = column_factors(local["column"], [columns], [period])
    v = _spread(local["v"], old, columns) * factor.square()
    entry.set_period(period)
    entry.local["v"].copy_(v.view(len(v), -1, period).double().mean(-1))
    if not entry.coded:
        return
    momentum = codebook.levels[local["codes"].int()] * _spread(local["scale"], old, columns) * factor * inverse
    blocks = momentum.view(len(v), -1, period)
    scale = blocks.abs().amax(-1) if blocks.numel() else entry.local["scale"]
    scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 0.0)
    relative = torch.where(scale > 0, 1.0 / scale, 0.0)[..., None] * blocks
    cells = (relative * HALF_CELLS + (HALF_CELLS + 0.5)).to(torch.int64)
    entry.local["codes"].copy_(codebook.codes[cells].view(local["codes"].shape))
    entry.local["scale"].copy_(scale)


def _spread(blocks: Tensor, period: int, columns: int) -> Tensor:
    """(rows, C / p) -> (rows, C)."""
    return blocks.repeat_interleave(period, dim=1) if columns else blocks
