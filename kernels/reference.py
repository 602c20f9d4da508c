"""Gefen's kernels in plain torch: what the fast backends must compute, and the path for devices and types they lack.

Every operation is rounded to fp32 by itself (no fused multiply-add) and sums are folded (``_fold``), so that a result
depends on nothing but the block: not on the number of rows, threads or ranks. On the CPU the fast backend gives the
same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.gefen import CELLS, HALF_CELLS, Codebook, Gauges, Matrix, Rule

# below this, 1 / scale overflows: the block counts as zero
TINY = 2.0**-126


@torch.no_grad()
def gefen_step(matrices: Sequence[Matrix], codebook: Codebook, rule: Rule, gauges: Gauges) -> None:
    """One step of Gefen (arXiv 2606.13894, Algorithm 1) on each matrix, in place, fp32 maths.

    With p-entry blocks, column factor f (1 where there is none), codes relative to f:

        m = beta1 * (levels[codes] * scale * factor) + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * mean over the block of g^2
        u = m * inverse                               # what is coded: its quantisation error is even over columns
        update = u * (1 / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        param = param * (1 - lr * weight_decay) - lr * update
        scale = max |u| over the block; codes = code of the cell of u / scale

    ``momentum`` in place of codes holds m. A block whose squared gradients have no finite sum, or whose u cannot be
    coded because it overflows, is left as it is and counted. A block of zeros gets scale 0.
    """
    for matrix in matrices:
        if matrix.param.numel():
            _step(matrix, codebook, rule, gauges)


def _step(matrix: Matrix, codebook: Codebook, rule: Rule, gauges: Gauges) -> None:
    rows, blocks = matrix.v.shape
    shape = (rows, blocks, -1)
    number = {name: torch.tensor(value, device=matrix.v.device) for name, value in rule.numbers().items()}
    g = matrix.grad.float()
    squares = _fold((g * g).view(shape))
    finite = squares.isfinite()

    if matrix.codes is None:
        assert matrix.momentum is not None
        m = matrix.momentum
    else:
        assert matrix.scale is not None
        m = (codebook.levels[matrix.codes.int()].view(shape) * matrix.scale[..., None]).view(rows, -1)
        if matrix.factor is not None:
            m = m * matrix.factor
    m = m * number["beta1"] + number["gain1"] * g
    u = m if matrix.inverse is None else m * matrix.inverse
    u = u.view(shape)
    v = matrix.v * number["beta2"] + number["gain2"] * (squares / u.shape[-1])
    # torch's root of fp32 is off by a bit now and then (MKL's), its root of fp64 rounded once is right
    root = (v * number["correction2"]).double().sqrt().float()
    gain = number["correction1"] / (root + number["eps"])

    largest = u.abs().amax(-1)
    scale = torch.where(largest >= TINY, largest, 0.0)
    coded = None
    if matrix.codes is not None:
        # no code stands for what is not finite
        finite = finite & largest.isfinite()
        shrunk = u * torch.where(largest >= TINY, 1.0 / largest, 0.0)[..., None]
        coded = codebook.codes[_cell(shrunk.where(finite[..., None], 0.0))]
        if rule.quantised_update:
            u = codebook.levels[coded.int()] * scale[..., None]
            largest = u.abs().amax(-1)
    update = (u * gain[..., None]).clamp(-number["max_update"], number["max_update"])
    param = matrix.param.float() * number["decay"] - number["lr"] * update.view(rows, -1)

    kept = finite[..., None].expand(u.shape).reshape(rows, -1)
    matrix.param.copy_(param.where(kept, matrix.param.float()))
    matrix.v.copy_(v.where(finite, matrix.v))
    if coded is None:
        assert matrix.momentum is not None
        matrix.momentum.copy_(m.where(kept, matrix.momentum))
    else:
        assert matrix.codes is not None and matrix.scale is not None
        matrix.codes.copy_(coded.view(rows, -1).where(kept, matrix.codes))
        matrix.scale.copy_(scale.where(finite, matrix.scale))
    reach = (largest * gain).clamp(max=number["max_update"]).where(finite, 0.0)
    gauges.max_update.copy_(torch.maximum(gauges.max_update, reach.amax()))
    gauges.nonfinite_blocks.add_((~finite).sum())


@torch.no_grad()
def code_histogram(matrices: Sequence[Matrix]) -> Tensor:
    """Count the cells of first-step momenta relative to their block's largest: (CELLS,) int64.

    The values are ``grad * inverse`` by block; reads ``grad``, ``inverse`` and the shape of ``v`` of each matrix.
    Blocks of zeros and blocks that are not finite do not count.
    """
    counts = torch.zeros(CELLS, dtype=torch.int64, device=matrices[0].grad.device)
    for matrix in matrices:
        if not matrix.grad.numel():
            continue
        u = matrix.grad.float() if matrix.inverse is None else matrix.grad.float() * matrix.inverse
        u = u.view(*matrix.v.shape, -1)
        largest = u.abs().amax(-1)
        chosen = largest.isfinite() & (largest >= TINY)
        counts += torch.bincount(_cell(u[chosen] * (1.0 / largest[chosen])[:, None]).flatten(), minlength=CELLS)
    return counts


@torch.no_grad()
def column_sums(grads: Sequence[Tensor]) -> list[Tensor]:
    """Sum over rows of the squared gradient: (R, C) each -> (C,) fp64 each, squared and summed in fp64."""
    return [grad.double().square().sum(0) for grad in grads]


def prepare(matrices: Sequence[Matrix]) -> None:
    """Compile what a step on such matrices will run; reads types only. Nothing to do here."""


def workspace_bytes(matrices: Sequence[Matrix]) -> int:
    """Bytes that ``gefen_step`` and ``column_sums`` allocate beyond their arguments, an upper bound."""
    return _largest_temporaries(matrices) + sum(8 * matrix.param.shape[1] for matrix in matrices)


def histogram_bytes(matrices: Sequence[Matrix]) -> int:
    """Bytes that ``code_histogram`` allocates beyond its arguments, an upper bound."""
    return _largest_temporaries(matrices) + 2 * 8 * CELLS


def _largest_temporaries(matrices: Sequence[Matrix]) -> int:
    # of one matrix at a time: at most nine of fp32 for every entry and eight for every block; and scalars
    sizes = (36 * matrix.param.numel() + 32 * matrix.v.numel() for matrix in matrices)
    return max(sizes, default=0) + 2**12


def _fold(x: Tensor) -> Tensor:
    """Sum over the last dimension in an order that depends on its length alone: the upper half onto the lower, again
    and again."""
    while (length := x.shape[-1]) > 1:
        half = (length + 1) // 2
        upper = x[..., half:]
        x = torch.cat([x[..., : length - half] + upper, x[..., length - half : half]], dim=-1)
    return x[..., 0]


def _cell(x: Tensor) -> Tensor:
    # two roundings, as everywhere here; the conversion truncates
    return (x * float(HALF_CELLS) + (HALF_CELLS + 0.5)).to(torch.int64)
