"""Matrices of a Gefen step for the tests of every backend: drawn on the CPU, so that each device gets the same."""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from kernels.gefen import CELLS, HALF_CELLS, Codebook, Matrix, Rule

RULE = Rule(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
# the tensors of a matrix that a step changes
UPDATED = ("param", "v", "codes", "scale", "momentum")


def draw_matrix(
    rows: int,
    columns: int,
    block: int,
    *,
    param_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    coded: bool = True,
    factored: bool = False,
    zero_columns: Sequence[int] = (),
    levels: int = 256,
    seed: int = 0,
) -> Matrix:
    """A matrix in the middle of training, on the CPU.

    Args:
        block: entries of a block; divides ``columns``.
        grad_dtype: the parameter's by default.
        coded: 8-bit momentum (``codes`` and ``scale``), otherwise fp32 ``momentum``.
        factored: with column factors of the last step and of this one, 16 times apart at the most.
        zero_columns: with ``factored``, columns whose gradients have been 0 so far and are.
        levels: codes are below this; as in the ``draw_codebook`` that the step is run with.
    """
    assert columns % block == 0
    generator = torch.Generator().manual_seed(seed)
    shape, blocks = (rows, columns), (rows, columns // block)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    grad = 1e-3 * draw(*shape) * torch.exp2(draw(1, columns))
    param = (0.02 * draw(*shape)).to(param_dtype)
    v = 1e-6 * torch.exp2(draw(*blocks))
    factor = inverse = codes = scale = momentum = None
    if factored:
        factor = torch.exp2(torch.rand(columns, generator=generator) * 4 - 2)
        now = torch.exp2(torch.rand(columns, generator=generator) * 4 - 2)
        factor[list(zero_columns)] = now[list(zero_columns)] = 0.0
        inverse = torch.where(now > 0, 1.0 / now, 0.0)
        grad[:, list(zero_columns)] = 0.0
    if coded:
        codes = torch.randint(0, levels, shape, generator=generator).to(torch.uint8)
        scale = 1e-3 * torch.exp2(draw(*blocks))
    else:
        momentum = 1e-3 * draw(*shape)
    return Matrix(param, grad.to(grad_dtype or param_dtype), v, codes, scale, momentum, factor, inverse)


def draw_codebook(levels: int = 256, bend: float = 2.0) -> Codebook:
    """Levels from -1 to 1, the denser about 0 the greater ``bend`` > 0; 0 itself is one of an odd number of them."""
    grid = (2 * torch.arange(levels, dtype=torch.float64) - (levels - 1)) / (levels - 1)
    bent = (grid * bend).sinh() / torch.tensor(bend, dtype=torch.float64).sinh()
    return codebook_of(bent.float())


def codebook_of(levels: Tensor) -> Codebook:
    """The codebook with these levels: (k,) fp32, ascending."""
    centres = (torch.arange(CELLS, dtype=torch.float64) - HALF_CELLS) / HALF_CELLS
    # argmin takes the first, that is the lower, of two equally near
    nearest = (centres[:, None] - levels.double()).abs().argmin(1)
    return Codebook(levels, nearest.to(torch.uint8))


def clone(matrix: Matrix, device: torch.device | str = "cpu") -> Matrix:
    """A copy that shares no memory."""
    return _apply(matrix, lambda tensor: tensor.to(device, copy=True))


def clone_all(matrices: Sequence[Matrix], device: torch.device | str = "cpu") -> list[Matrix]:
    return [clone(matrix, device) for matrix in matrices]


def cut_rows(matrix: Matrix, start: int, stop: int) -> Matrix:
    """Rows ``start`` to ``stop`` of a matrix, as views; the column factors whole."""
    whole = {"factor": matrix.factor, "inverse": matrix.inverse}
    return replace(_apply(matrix, lambda tensor: tensor[start:stop]), **whole)


def updated_tensors(matrix: Matrix) -> dict[str, Tensor]:
    """Name -> tensor of what a step changes, on the CPU."""
    values = {name: getattr(matrix, name) for name in UPDATED}
    return {name: value.cpu() for name, value in values.items() if value is not None}


def assert_same_bits(actual: Matrix, expected: Matrix, message: str = "") -> None:
    """Everything that a step changes is equal bit for bit; 0 and -0 count as equal, NaN and NaN do not."""
    ours, theirs = updated_tensors(actual), updated_tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), f"{message} {name}: {value} instead of {theirs[name]}"


def _apply(matrix: Matrix, change) -> Matrix:
    values = {field.name: getattr(matrix, field.name) for field in fields(matrix)}
    return Matrix(**{name: None if value is None else change(value) for name, value in values.items()})
