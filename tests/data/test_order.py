"""The order is a bijection of each epoch, a function of (seed, epoch) alone, and mixes sources by quota."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.checks import ConfigError
from data.order import MAX_BLOCK, QUOTA_ERROR, SampleOrder, block_quotas, permute


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size, key):
    image = permute(np.arange(size), size, key)
    assert image.dtype == np.int64 and np.array_equal(np.sort(image), np.arange(size))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_permute_of_large_sets_is_injective_and_inside(size, key, data):
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=50))))
    image = permute(indices, size, key)
    assert len(set(image.tolist())) == len(indices) and (0 <= image).all() and (image < size).all()


def test_permute_with_a_key_per_index_equals_one_key_at_a_time():
    keys = np.array([3, 9, 3, 9], dtype=np.uint64)
    indices = np.array([0, 0, 5, 5])
    single = [int(permute(indices[i : i + 1], 11, int(keys[i]))[0]) for i in range(4)]
    assert permute(indices, 11, keys).tolist() == single


def test_known_values():
    # a changed order would silently break every resumed run: these numbers may only change with the format
    assert SampleOrder([1000], [1.0], 0).sample_ids(0, 6).tolist() == KNOWN
    assert SampleOrder([5, 7], [3.0, 1.0], 7).sample_ids(100, 8).tolist() == KNOWN_MIXTURE


KNOWN = [261, 259, 788, 938, 486, 950]
KNOWN_MIXTURE = [11, 6, 7, 4, 0, 1, 1, 0]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_small_permutations_are_about_uniform(size):
    # where element 0 goes, and who follows it, over 4,000 epochs; 5 standard deviations of a fair draw
    order = SampleOrder([size], [1.0], 1).sample_ids(0, 4000 * size).reshape(4000, size)
    for column in range(size):
        counts = np.bincount(order[:, column], minlength=size)
        assert np.abs(counts - 4000 / size).max() < 5 * np.sqrt(4000 / size)
    pairs = np.bincount(order[:, 0] * size + order[:, 1], minlength=size * size)
    expected = 4000 / (size * (size - 1))
    assert pairs[:: size + 1].sum() == 0
    assert np.abs(pairs[pairs > 0] - expected).max() < 5 * np.sqrt(expected)


def test_neighbours_are_spread():
    order = SampleOrder([10000], [1.0], 3).sample_ids(0, 10000)
    gaps = np.abs(np.diff(order))
    # a random permutation has mean gap n / 3 and correlation of about 1 / sqrt(n) with its place
    assert abs(gaps.mean() / (10000 / 3) - 1) < 0.03
    assert abs(np.corrcoef(order, np.arange(10000))[0, 1]) < 0.05


def test_every_epoch_is_complete_and_different():
    order = SampleOrder([97], [1.0], 5)
    epochs = order.sample_ids(0, 97 * 4).reshape(4, 97)
    for epoch in epochs:
        assert sorted(epoch) == list(range(97))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = SampleOrder([97], [1.0], 6).sample_ids(0, 97)
    assert not np.array_equal(other, epochs[0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(0, 5000),
    st.lists(st.integers(1, 200), max_size=6),
)
def test_the_stream_does_not_depend_on_how_it_is_cut(lengths, start, cuts):
    order = SampleOrder(lengths, [1.0 + index for index in range(len(lengths))], 2)
    whole = order.sample_ids(start, sum(cuts))
    parts, position = [np.zeros(0, np.int64)], start
    for cut in cuts:
        parts.append(order.sample_ids(position, cut))
        position += cut
    assert np.array_equal(whole, np.concatenate(parts))


def test_mixture_gives_each_source_its_share_in_its_own_complete_epochs():
    lengths, weights = [50, 300, 20], [1.0, 2.0, 1.0]
    order = SampleOrder(lengths, weights, 4)
    block = int(order.quotas.sum())
    ids = order.sample_ids(0, block * 25)
    source = np.searchsorted(np.cumsum(lengths), ids, side="right")
    for number, share in enumerate((0.25, 0.5, 0.25)):
        assert (source == number).sum() == share * block * 25
        # within a block the places are in random order, so an epoch's ids may leave a block late, not the block
        mine = ids[source == number] - sum(lengths[:number])
        counts = np.bincount(mine, minlength=lengths[number])
        assert counts.max() - counts.min() <= 1
    # no long run of one source: the places of a block are permuted
    runs = np.diff(np.flatnonzero(np.diff(source)))
    assert runs.max() < 25


def test_cost_does_not_grow_with_position_or_size():
    order = SampleOrder([10**12, 10**11], [0.9, 0.1], 0)
    far = order.sample_ids(10**15, 1000)
    assert len(far) == 1000 and far.max() < 11 * 10**11 and far.min() >= 0


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [0.7, 0.3], [1, 999], [0.123456, 0.5, 0.376544], [3, 3, 3]])
def test_quotas_keep_the_shares(weights):
    quotas = block_quotas(weights)
    shares = np.array(weights) / sum(weights)
    assert (np.abs(quotas / quotas.sum() - shares) <= QUOTA_ERROR * shares).all() and quotas.sum() <= MAX_BLOCK


@pytest.mark.parametrize("weights", [[1.0, 1e-9], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_weights_that_cannot_be_kept(weights):
    with pytest.raises(ConfigError, match="data.sources weights"):
        block_quotas(weights)
