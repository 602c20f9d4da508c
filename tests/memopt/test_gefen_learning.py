"""What is carried over when a period or a codebook changes: every entry's momentum and second moment."""

import pytest
import torch
from torch import nn

from memopt.column_factor import column_factors
from memopt.gefen import Gefen
from memopt.gefen_learning import grouped, recode, repartition
from tests.kernels.matrices import draw_codebook

COLUMNS = 48


def trained(second_moment: str, momentum: str):
    """An optimizer after some steps, its entry, and what each entry's m and v are."""
    weight = nn.Parameter(torch.zeros(5, COLUMNS))
    optimizer = Gefen([weight], 0.0, partition="fixed", block=12, second_moment=second_moment, momentum=momentum)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        weight.grad = torch.randn(5, COLUMNS, generator=generator) * torch.linspace(0.1, 3, COLUMNS)
        weight.grad[:, 7] = 0
        optimizer.step()
    return optimizer, optimizer._entries[weight]


def moments(entry, codebook) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, v) of every entry as the next step would read them."""
    state, period = entry.local, entry.period
    factor = torch.ones(COLUMNS)
    if entry.factored:
        factor, _ = column_factors(state["column"], [COLUMNS], [period])
    v = state["v"].repeat_interleave(period, 1) * factor.square()
    if not entry.coded:
        return state["momentum"].clone(), v
    return codebook.levels[state["codes"].int()] * state["scale"].repeat_interleave(period, 1) * factor, v


@pytest.mark.parametrize("momentum", ["8bit", "fp32"])
@pytest.mark.parametrize("second_moment", ["block", "factored"])
@pytest.mark.parametrize("period", [4, 6, 16, 48])
def test_another_period_keeps_momentum_and_the_means_of_v(second_moment: str, momentum: str, period: int):
    optimizer, entry = trained(second_moment, momentum)
    codebook = optimizer._codebook(torch.device("cpu"))
    m, v = moments(entry, codebook)
    repartition(entry, period, codebook)
    assert entry.period == entry.state["period"] == period and entry.state["v"].shape == (5, COLUMNS // period)
    new_m, new_v = moments(entry, codebook)
    means = [part.view(5, -1, period).mean(-1) for part in (new_v, v)]
    torch.testing.assert_close(*means, rtol=1e-5, atol=0)
    if second_moment == "factored":
        inside = v.view(5, -1, period) / v.view(5, -1, period).mean(-1, keepdim=True)
        if period in (4, 6):
            # smaller blocks within the old ones: v of every entry stays
            torch.testing.assert_close(new_v, v, rtol=1e-5, atol=0)
        assert inside.isfinite().all()
    if momentum == "fp32":
        assert torch.equal(new_m, m)
    else:
        # one more rounding, of half a gap between levels at most
        factor = (
            column_factors(entry.local["column"], [COLUMNS], [period])[0] if entry.factored else torch.ones(COLUMNS)
        )
        largest = entry.local["scale"].repeat_interleave(period, 1) * factor
        gap = codebook.levels.diff().max() / 2 + 1 / 2047
        assert ((new_m - m).abs() <= gap * largest + 1e-12).all()


def test_codes_of_another_codebook_are_the_nearest():
    old, new = draw_codebook(256, 2.0), draw_codebook(128, 3.0)
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    recoded = codes.clone()
    recode(recoded, old, new)
    distance = (new.levels[recoded.int()] - old.levels[codes.int()]).abs()
    nearest = (new.levels[None, :] - old.levels[:, None]).abs().min(1).values.view(4, 64)
    assert (distance <= nearest + 1 / 2047).all() and recoded.max() < 128
    again = codes.clone()
    recode(again, old, old)
    assert torch.equal(again, codes)


def test_groups_keep_the_order_of_first_appearance():
    assert list(grouped(["b1", "a1", "b2"], lambda value: value[0]).items()) == [("b", ["b1", "b2"]), ("a", ["a1"])]
