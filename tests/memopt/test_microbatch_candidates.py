"""Candidates of a rank batch: against brute force, and what cannot be cut."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.microbatch import Candidate, Settings, candidates


@pytest.mark.parametrize("rank_batch", range(1, 201))
def test_candidates_are_the_distinct_sizes_with_fewest_microbatches(rank_batch):
    least = {}
    for n in range(rank_batch, 0, -1):
        least[math.ceil(rank_batch / n)] = n
    found = candidates(rank_batch)
    assert {one.rows: one.accumulation for one in found} == least
    assert [one.rows for one in found] == sorted(least)
    assert len(found) <= 2 * math.sqrt(rank_batch)
    for one in found:
        sizes = one.sizes(rank_batch)
        assert sum(sizes) == rank_batch and len(sizes) == one.accumulation
        assert max(sizes) == one.rows and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rank_batch", [1, 7, 12, 64, 100])
def test_static_shapes_have_equal_microbatches(rank_batch):
    found = candidates(rank_batch, divisors_only=True)
    assert [one.rows for one in found] == [rows for rows in range(1, rank_batch + 1) if rank_batch % rows == 0]
    assert all(set(one.sizes(rank_batch)) == {one.rows} for one in found)


def test_sizes_are_those_of_tensor_split():
    import torch

    assert Candidate(3, 4).sizes(11) == tuple(len(part) for part in torch.arange(11).tensor_split(4))


@given(st.integers(1, 300), st.data())
def test_bounds_clamp(rank_batch, data):
    lowest = data.draw(st.integers(1, rank_batch))
    found = candidates(rank_batch, lowest=lowest)
    assert [one.rows for one in found] == [one.rows for one in candidates(rank_batch) if one.rows >= lowest]
    found = candidates(rank_batch, highest=lowest)
    assert [one.rows for one in found] == [one.rows for one in candidates(rank_batch) if one.rows <= lowest]


def test_policies_make_pairs_leanest_first():
    found = candidates(4, policies=("full", "none"))
    assert [(one.policy, one.rows) for one in found] == [(p, rows) for p in ("full", "none") for rows in (1, 2, 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lowest": 3, "highest": 2}, r"3 to 2 rows hold no size.*at most the highest"),
        ({"lowest": 0}, r"0 to 16 rows"),
        ({"lowest": 5, "highest": 5}, r"from 5 to 5 rows cuts the 16 rows.*nearest are 4 and 6"),
        ({"lowest": 3, "highest": 3, "divisors_only": True}, r"16 rows of a rank evenly.*nearest are 2 and 4"),
        ({"lowest": 20, "highest": 30}, r"nearest are 16"),
        ({"policies": ("none", "none")}, r"different ones"),
    ],
)
def test_bounds_that_leave_nothing_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        candidates(16, **arguments)


@pytest.mark.parametrize("wrong", [{"margin": 1.0}, {"margin": -0.1}, {"entry_ratio": 0.5}, {"interval": 0}])
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(1000, **wrong)
