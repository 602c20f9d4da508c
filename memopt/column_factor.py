"""The column factor of a factored second moment.

Gefen shares v over a block of a row; multiplied by c_j / (mean of c over the block's columns) it keeps the block's mean
and gains the columns' shape. c is an average over steps of the column means of the squared gradient: the factoring of
Adafactor (Shazeer and Stern, arXiv 1804.04235, section 3), here on top of any period. The square root of the factor
divides the update.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# a column this much below its block (2^-60, 1e-18) counts as zero: one over its factor would lose fp32's range
SMALLEST_FACTOR = 2.0**-60


def updated_columns(columns: Tensor, means: Tensor, lengths: Sequence[int], beta2: float, eps: float) -> Tensor:
    """c after a step: the average of ``columns`` (n,) fp32 and the column means ``means`` (n,) fp64 of g^2 + eps^2.

    eps does for a column what it does for a block: one whose gradient is below it is not scaled up to the others. A
    mean that is not finite leaves all columns of its matrix as they were, since the codes of blocks that are left
    alone are relative to them. ``lengths``: columns of each matrix.
    """
    averaged = columns * beta2 + (means + eps * eps).float() * (1.0 - beta2)
    if columns.is_cpu and averaged.isfinite().all():
        # where asking is free
        return averaged
    sizes = torch.tensor(list(lengths), device=columns.device)
    matrix = torch.repeat_interleave(sizes, output_size=len(columns))
    wrong = torch.zeros(len(lengths), dtype=torch.int64, device=columns.device)
    wrong.index_add_(0, matrix, (~averaged.isfinite()).long())
    return averaged.where(wrong[matrix] == 0, columns)


def column_factors(columns: Tensor, lengths: Sequence[int], periods: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Roots of the column factors, and one over them.

    Args:
        columns: (n,) fp32, c of several matrices one after the other.
        lengths: columns of each matrix; they add up to n.
        periods: period of each matrix.

    Returns:
        factor: (n,) fp32, sqrt(c_j / mean of c over the columns of the block); 0 where that mean is 0.
        inverse: (n,) fp32, 1 / factor, and 0 where factor is 0: such a column has had no gradient.
    """
    wide = columns.double()
    means = torch.empty_like(wide)
    start = 0
    for length, period in _runs(lengths, periods):
        blocks = wide[start : start + length].view(-1, period)
        means[start : start + length] = blocks.mean(1, keepdim=True).expand_as(blocks).reshape(-1)
        start += length
    factor = torch.where(means > 0, wide / means, 0.0).sqrt()
    factor = factor.where(factor >= SMALLEST_FACTOR, 0.0).float()
    return factor, torch.where(factor > 0, 1.0 / factor, 0.0)


def _runs(lengths: Sequence[int], periods: Sequence[int]) -> list[tuple[int, int]]:
    """(length, period) with neighbours of one period joined: few launches for many matrices."""
    runs: list[tuple[int, int]] = []
    for length, period in zip(lengths, periods, strict=True):
        if runs and runs[-1][1] == period:
            runs[-1] = (runs[-1][0] + length, period)
        else:
            runs.append((length, period))
    return runs
