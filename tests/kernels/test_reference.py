"""The reference against the formula of its docstring, written down entry by entry in fp64, and what it promises beside
it: results that depend on the block alone, and blocks left alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.gefen import CELLS, HALF_CELLS, Codebook, Gauges, Matrix, Rule
from tests.kernels.matrices import (
    RULE,
    assert_same_bits,
    clone,
    codebook_of,
    cut_rows,
    draw_codebook,
    draw_matrix,
    updated_tensors,
)

CPU = torch.device("cpu")
BF16 = torch.bfloat16
CODEBOOK = draw_codebook()
# what a rounding of each type may change, relative
TOLERANCE = {torch.float32: 1e-5, BF16: 2.0**-8}
CASES = {
    "row": dict(rows=3, columns=20, block=20),
    "blocks": dict(rows=2, columns=12, block=4),
    "entries": dict(rows=2, columns=3, block=1),
    "odd, factored": dict(rows=2, columns=21, block=7, factored=True, zero_columns=(0, 8)),
    "bf16": dict(rows=2, columns=12, block=6, param_dtype=BF16, factored=True),
    "bf16 gradient": dict(rows=2, columns=12, block=6, grad_dtype=BF16),
    "fp32 momentum": dict(rows=2, columns=12, block=6, coded=False),
    "fp32 momentum, factored": dict(rows=2, columns=12, block=6, coded=False, factored=True, zero_columns=(2,)),
}
RULES = {
    "plain": RULE,
    "first step": replace(RULE, step=1),
    "limited": replace(RULE, max_update=0.5),
    "quantised": replace(RULE, quantised_update=True),
    "quantised, limited": replace(RULE, quantised_update=True, max_update=0.5),
}


def step(matrix: Matrix, rule: Rule = RULE, codebook: Codebook = CODEBOOK) -> tuple[Matrix, Gauges]:
    """The matrix after a step of the reference, and what the gauges say."""
    after, gauges = clone(matrix), Gauges.zeros(CPU)
    reference.gefen_step([after], codebook, rule, gauges)
    return after, gauges


def check_block(before: Matrix, after: Matrix, row: int, block: int, rule: Rule) -> float:
    """Compare one block with the formula in fp64; its largest update."""
    p = before.param.shape[1] // before.v.shape[1]
    columns = range(block * p, block * p + p)

    def entries(tensor: Tensor) -> list[float]:
        return [float(tensor[row, j]) for j in columns]

    g = entries(before.grad)
    factor = [1.0 if before.factor is None else float(before.factor[j]) for j in columns]
    inverse = [1.0 if before.inverse is None else float(before.inverse[j]) for j in columns]
    if before.codes is None:
        m = entries(before.momentum)
    else:
        levels = [float(CODEBOOK.levels[before.codes[row, j].item()]) for j in columns]
        m = [level * float(before.scale[row, block]) * f for level, f in zip(levels, factor, strict=True)]
    m = [rule.beta1 * x + (1 - rule.beta1) * y for x, y in zip(m, g, strict=True)]
    u = [x * y for x, y in zip(m, inverse, strict=True)]
    v = rule.beta2 * float(before.v[row, block]) + (1 - rule.beta2) * sum(x * x for x in g) / p
    assert float(after.v[row, block]) == pytest.approx(v, rel=1e-5)
    if before.codes is None:
        assert entries(after.momentum) == pytest.approx(m, rel=1e-5, abs=1e-12)
    else:
        scale = max(abs(x) for x in u)
        assert float(after.scale[row, block]) == pytest.approx(scale, rel=1e-5)
        kept = [float(CODEBOOK.levels[after.codes[row, j].item()]) for j in columns]
        for x, level in zip(u, kept, strict=True):
            # the nearest level to the centre of the value's cell, half a cell away at the most
            nearest = min(abs(float(other) - x / scale) for other in CODEBOOK.levels)
            assert abs(level - x / scale) <= nearest + 1.001 / HALF_CELLS
        if rule.quantised_update:
            u = [level * scale for level in kept]
    root = math.sqrt(v / (1 - rule.beta2**rule.step)) + rule.eps
    updates = [x / (1 - rule.beta1**rule.step) / root for x in u]
    updates = [min(max(x, -rule.max_update), rule.max_update) for x in updates]
    decay = 1 - rule.lr * rule.weight_decay
    param = [x * decay - rule.lr * y for x, y in zip(entries(before.param), updates, strict=True)]
    assert entries(after.param) == pytest.approx(param, rel=TOLERANCE[before.param.dtype], abs=1e-6)
    return max(abs(x) for x in updates)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_the_formula(case: dict, rule: Rule):
    before = draw_matrix(**case)
    after, gauges = step(before, rule)
    rows, blocks = before.v.shape
    largest = max(check_block(before, after, row, block, rule) for row in range(rows) for block in range(blocks))
    assert gauges.max_update.item() == pytest.approx(largest, rel=1e-5)
    assert gauges.nonfinite_blocks.item() == 0
    for name in ("grad", "factor", "inverse"):
        value = getattr(before, name)
        assert value is None or torch.equal(value, getattr(after, name))


def test_every_operation_is_rounded_by_itself():
    """numpy's are. So the result does not depend on which library torch takes a square root from."""
    before = draw_matrix(300, 4, 1, coded=False)
    after, gauges = step(before)
    number = {name: np.float32(value) for name, value in RULE.numbers().items()}
    param, grad, momentum, v = (tensor.numpy() for tensor in (before.param, before.grad, before.momentum, before.v))
    m = momentum * number["beta1"] + number["gain1"] * grad
    v = v * number["beta2"] + number["gain2"] * (grad * grad)
    gain = number["correction1"] / (np.sqrt(v * number["correction2"]) + number["eps"])
    expected = {"momentum": m, "v": v, "param": param * number["decay"] - number["lr"] * (m * gain)}
    for name, value in expected.items():
        assert torch.equal(getattr(after, name), torch.from_numpy(value)), name
    assert gauges.max_update.item() == np.abs(m * gain).max()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_do_not_depend_on_each_other(case: dict):
    before = draw_matrix(**case | {"rows": 7})
    whole, _ = step(before)
    pieces = [step(cut_rows(before, *bounds))[0] for bounds in ((0, 1), (1, 5), (5, 5), (5, 7))]
    for piece, bounds in zip(pieces, ((0, 1), (1, 5), (5, 5), (5, 7)), strict=True):
        assert_same_bits(piece, cut_rows(whole, *bounds))


def test_gauges_keep_the_largest_and_add_up():
    small, large = draw_matrix(2, 8, 8), draw_matrix(2, 8, 8, seed=1)
    small.grad.mul_(1e-3)
    large.grad[1, 3] = math.nan
    gauges = Gauges.zeros(CPU)
    alone = [step(matrix)[1].max_update.item() for matrix in (small, large)]
    for _ in range(2):
        reference.gefen_step([clone(large), clone(small)], CODEBOOK, RULE, gauges)
    assert gauges.max_update.item() == max(alone)
    assert gauges.nonfinite_blocks.item() == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("coded", [True, False])
def test_a_block_without_a_finite_sum_of_squares_is_left_alone(bad: float, coded: bool):
    before = draw_matrix(3, 12, 4, coded=coded, factored=True)
    clean, _ = step(before)
    before.grad[1, 6] = bad
    after, gauges = step(before)
    assert gauges.nonfinite_blocks.item() == 1
    for name, value in updated_tensors(after).items():
        blocks = value.view(3, 3, -1)
        assert torch.equal(blocks[1, 1], getattr(before, name).view(3, 3, -1)[1, 1])
        others = torch.ones(3, 3, dtype=torch.bool)
        others[1, 1] = False
        assert torch.equal(blocks[others], getattr(clean, name).view(3, 3, -1)[others])


@pytest.mark.parametrize("codebook", [CODEBOOK, draw_codebook(255)], ids=["no level at 0", "level at 0"])
def test_a_block_of_zeros_stays_finite(codebook: Codebook):
    before = draw_matrix(2, 8, 8, levels=255)
    before.grad.zero_()
    before.scale.zero_()
    before.v.zero_()
    after, gauges = step(before, codebook=codebook)
    assert not after.scale.any() and not after.v.any()
    torch.testing.assert_close(after.param, before.param * (1 - RULE.lr * RULE.weight_decay))
    assert gauges.max_update.item() == 0
    assert codebook.levels[after.codes.int()].abs().max() <= 1 / 255


def test_a_zero_column_of_the_factor_does_not_move():
    before = draw_matrix(3, 8, 8, factored=True, zero_columns=(2,))
    after, _ = step(before, replace(RULE, weight_decay=0.0))
    assert torch.equal(after.param[:, 2], before.param[:, 2])
    assert not torch.equal(after.param[:, 3], before.param[:, 3])


def test_a_momentum_below_the_smallest_scale_is_zero():
    before = draw_matrix(1, 8, 8)
    before.grad.fill_(1e-38)
    before.scale.zero_()
    assert step(before)[0].scale.item() == 0
    before.grad.fill_(1e-36)
    assert step(before)[0].scale.item() == pytest.approx(1e-37)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 11, 512, 1376])
def test_squares_are_folded(length: int):
    x = torch.rand(3, length, generator=torch.Generator().manual_seed(0))
    folded = reference._fold(x)
    torch.testing.assert_close(folded, x.double().sum(-1).float(), rtol=1e-6, atol=0)
    assert torch.equal(folded[1:2], reference._fold(x[1:2]))


def test_squares_are_folded_in_halves():
    x = torch.tensor([1.0, 1.0, 2.0**24, 1.0, -(2.0**24)])
    # any other order loses a 1 beside 2^24
    assert reference._fold(x).item() == ((1 + 1) + 2.0**24) + (1 - 2.0**24)


def test_cells_are_counted():
    matrix = draw_matrix(4, 12, 4, factored=True)
    matrix.grad[0, :4] = 0
    matrix.grad[1, 5] = math.inf
    matrix.grad[2, 3] = math.nan
    counts = reference.code_histogram([matrix, draw_matrix(0, 8, 8), matrix])
    expected = [0] * CELLS
    u = (matrix.grad * matrix.inverse).view(-1, 4).tolist()
    for block in u:
        largest = max(abs(x) for x in block)
        if all(map(math.isfinite, block)) and largest:
            for x in block:
                expected[int(x / largest * HALF_CELLS + HALF_CELLS + 0.5)] += 2
    assert counts.dtype == torch.int64 and counts.shape == (CELLS,)
    assert counts.sum().item() == sum(expected) == 2 * 9 * 4
    # fp32 may put a value on the edge of a cell into the next
    assert sum(abs(a - b) for a, b in zip(counts.cumsum(0), torch.tensor(expected).cumsum(0), strict=True)) <= 2


def test_cells_of_the_ends_and_of_zero():
    matrix = draw_matrix(1, 4, 4)
    matrix.grad[0] = torch.tensor([2.0, -2.0, 0.0, 1e-9])
    assert reference.code_histogram([matrix]).nonzero().flatten().tolist() == [0, HALF_CELLS, CELLS - 1]


def test_columns_are_summed_in_fp64():
    grad = torch.tensor([[1.0, 3.0], [2.0**-20, 4.0]])
    (sums,) = reference.column_sums([grad])
    assert sums.dtype == torch.float64 and sums.tolist() == [1 + 2.0**-40, 25.0]
    assert reference.column_sums([grad.to(BF16), torch.zeros(0, 3)])[1].tolist() == [0, 0, 0]


def test_codes_are_those_of_the_cells():
    codebook = codebook_of(torch.tensor([-1.0, 0.0, 1.0]))
    before = draw_matrix(1, 4, 4, levels=3)
    before.grad[0] = torch.tensor([2.0, 0.4, 0.6, -0.9])
    before.scale.zero_()
    assert step(before, codebook=codebook)[0].codes.tolist() == [[2, 1, 1, 1]]
    before.grad[0] = torch.tensor([2.0, 1.1, -2.0, -1.1])
    assert step(before, codebook=codebook)[0].codes.tolist() == [[2, 2, 0, 0]]


def test_a_momentum_that_overflows_leaves_its_block_alone():
    """It has no code; a cell that it does not have must not become an address."""
    matrix = draw_matrix(4, 64, 16)
    assert matrix.scale is not None and matrix.codes is not None
    matrix.scale[1, 2] = float("inf")
    before, gauges = clone(matrix), Gauges.zeros(torch.device("cpu"))
    reference.gefen_step([matrix], draw_codebook(), RULE, gauges)
    block = slice(32, 48)
    assert torch.equal(matrix.codes[1, block], before.codes[1, block])
    assert torch.equal(matrix.param[1, block], before.param[1, block])
    assert gauges.nonfinite_blocks.item() == 1
