"""What one Gefen step works on: the arguments of every backend's ``gefen_step``, in plain tensors.

Legend: R rows of this rank, C entries a row, p entries a block (p divides C, a block never crosses a row), B = C / p
blocks a row. A backend is a module with the functions of ``kernels.reference``, which define the results.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# cells of [-1, 1] that values are sorted into: 16 for each of 256 levels (arXiv 2606.13894, Algorithm 3), less one, so
# that -1, 0 and 1 are centres of cells
HALF_CELLS = 2047
CELLS = 2 * HALF_CELLS + 1


@dataclass(frozen=True)
class Codebook:
    """The levels of an 8-bit momentum, and the code of every cell.

    The cell of x in [-1, 1] is ``trunc(x * HALF_CELLS + HALF_CELLS + 0.5)``; its code is the level nearest to the
    cell's centre, the lower one of two equally near. Both tensors are 0 until the codebook is learned.
    """

    levels: Tensor
    """(k,) fp32, ascending from -1 to 1, k <= 256."""
    codes: Tensor
    """(CELLS,) uint8."""


@dataclass(frozen=True)
class Matrix:
    """One matrix of a step; tensors are contiguous and of this rank's rows. R may be 0."""

    param: Tensor
    """(R, C) fp32 or bf16; updated."""
    grad: Tensor
    """(R, C) fp32 or bf16."""
    v: Tensor
    """(R, B) fp32: average over steps of the block's mean squared gradient; updated."""
    codes: Tensor | None = None
    """(R, C) uint8: momentum, relative to ``scale`` and ``factor``; updated."""
    scale: Tensor | None = None
    """(R, B) fp32: the largest absolute momentum of the block; updated."""
    momentum: Tensor | None = None
    """(R, C) fp32: the momentum itself, in place of ``codes`` and ``scale``; updated."""
    factor: Tensor | None = None
    """(C,) fp32: column factor that ``codes`` were written with; None for 1."""
    inverse: Tensor | None = None
    """(C,) fp32: one over the column factor of this step, 0 where that factor is 0; None for 1."""


@dataclass(frozen=True)
class Rule:
    """The numbers of one step. Backends round them to fp32 after computing in double precision."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Steps of these parameters, this one included."""
    max_update: float = float("inf")
    """Entries of the update, before ``lr``, are cut to this."""
    quantised_update: bool = False
    """Whether the update is made from the momentum as it is kept, not as it was before it was coded."""

    def numbers(self) -> dict[str, float]:
        """What the step multiplies with: names as in ``kernels.reference.gefen_step``."""
        return {
            "beta1": self.beta1,
            "gain1": 1.0 - self.beta1,
            "beta2": self.beta2,
            "gain2": 1.0 - self.beta2,
            "correction1": 1.0 / (1.0 - self.beta1**self.step),
            "correction2": 1.0 / (1.0 - self.beta2**self.step),
            "eps": self.eps,
            "decay": 1.0 - self.lr * self.weight_decay,
            "lr": self.lr,
            "max_update": self.max_update,
        }


@dataclass(frozen=True)
class Gauges:
    """What a step reports without being waited for; on the device of the matrices."""

    max_update: Tensor
    """(1,) fp32: largest |update| before ``lr`` since it was last set to 0; raised."""
    nonfinite_blocks: Tensor
    """(1,) int64: blocks left alone because their squared gradients have no finite sum; raised."""

    @classmethod
    def zeros(cls, device: torch.device) -> "Gauges":
        return cls(torch.zeros(1, dtype=torch.float32, device=device), torch.zeros(1, dtype=torch.int64, device=device))
