"""The factor keeps each block's mean, and nothing divides by a column that has had no gradient."""

import torch

from memopt.column_factor import column_factors, updated_columns


def test_squares_have_mean_one_in_each_block():
    columns = torch.rand(24, generator=torch.Generator().manual_seed(0)) * 1e-12 + 1e-14
    factor, inverse = column_factors(columns, [12, 8, 4], [12, 4, 4])
    assert factor.dtype == inverse.dtype == torch.float32
    for block in (factor[:12], factor[12:16], factor[16:20], factor[20:]):
        torch.testing.assert_close(block.square().mean(), torch.tensor(1.0))
    torch.testing.assert_close(factor * inverse, torch.ones(24))
    torch.testing.assert_close(factor[0] / factor[1], (columns[0] / columns[1]).sqrt())
    # each matrix as if it were alone
    alone = [
        column_factors(part, [len(part)], [p])[0] for part, p in zip(columns.split([12, 8, 4]), (12, 4, 4), strict=True)
    ]
    assert torch.equal(factor, torch.cat(alone))


def test_columns_without_gradient():
    columns = torch.tensor([0.0, 0.0, 0.0, 0.0, 1e-30, 0.0, 1.0, 1e-45])
    factor, inverse = column_factors(columns, [8], [4])
    assert torch.equal(factor[:4], torch.zeros(4)) and torch.equal(inverse[:4], torch.zeros(4))
    assert factor[5] == inverse[5] == 0 and factor[7] == inverse[7] == 0
    assert factor.isfinite().all() and inverse.isfinite().all()
    assert inverse[6] == 0.5 and 0 < factor[4] < 1e-14


def test_an_average_over_steps_that_passes_over_matrices_that_are_not_finite():
    """All columns of such a matrix: the codes of a block that is left alone are relative to them."""
    columns = torch.ones(5)
    means = torch.tensor([3.0, 5.0, 3.0, float("nan"), float("inf")], dtype=torch.float64)
    expected = torch.tensor([2.0, 3.0, 1.0, 1.0, 1.0])
    assert torch.equal(updated_columns(columns, means, [2, 2, 1], 0.5, 0.0), expected)


def test_eps_is_added_as_to_a_second_moment():
    averaged = updated_columns(torch.zeros(2), torch.tensor([0.0, 9.0], dtype=torch.float64), [2], 0.75, 2.0)
    assert torch.equal(averaged, torch.tensor([1.0, 3.25]))
