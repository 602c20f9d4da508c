"""The order of samples, as a function of (seed, epoch) that is computed and never stored.

A keyed bijection on ``0 .. n - 1`` gives the sample at any place of any epoch in constant time and memory: an
alternating Feistel network over the bits of n whose results beyond n are permuted again until they fall inside (cycle
walking). Several sources are mixed in blocks: each block of the global stream gives every source a fixed quota of
places, and a bijection of the block says which. A source's place in its own stream therefore follows from the block
number alone, and every source runs through its own permuted epochs. Nothing here knows about ranks: a rank takes
its rows from the ids of the global batch.
"""

import math
from collections.abc import Sequence

import numpy as np

from conf.checks import ConfigError

ROUNDS = 8
# smallest domain of the network: permutations of a few elements need more than a bit per half to look random
MIN_BITS = 6
# blocks of a mixture: the smallest power of two that gives each source its share within QUOTA_ERROR
MIN_BLOCK, MAX_BLOCK = 1 << 6, 1 << 20
QUOTA_ERROR = 1e-3

# the finaliser of splitmix64 (Steele, Lea and Flood 2014)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def permute(indices: np.ndarray, size: int, key: np.ndarray | int) -> np.ndarray:
    """Image of ``indices`` under the bijection of ``0 .. size - 1`` that ``key`` names.

    Args: ``indices`` int64 (n,) in ``0 .. size - 1``; ``key`` one integer, or uint64 (n,) with one for each index.
    Returns int64 (n,). Equal input gives equal output on every machine.
    """
    assert size >= 1 and indices.ndim == 1
    keys = np.broadcast_to(np.asarray(key, dtype=np.uint64), indices.shape)
    bits = max(MIN_BITS, (size - 1).bit_length())
    values = indices.astype(np.uint64)
    pending = np.arange(indices.size)
    while pending.size:
        values[pending] = _feistel(values[pending], bits, keys[pending])
        pending = pending[values[pending] >= np.uint64(size)]
    return values.astype(np.int64)


class SampleOrder:
    """The endless global stream of sample ids over one or several sources.

    Args: ``lengths`` samples of each source; ``weights`` share of the stream of each, any positive scale; ``seed``.
    A sample id is ``offset of its source + index in its source``, in ``0 .. sum(lengths) - 1``. ConfigError: a source
    without samples, or a weight too small to be kept.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], seed: int) -> None:
        assert len(lengths) == len(weights) >= 1 and min(lengths) >= 1
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.offsets = np.cumsum(self.lengths) - self.lengths
        self.seed = seed
        self.quotas = block_quotas(weights)
        self._ends = np.cumsum(self.quotas)
        self._block = int(self._ends[-1])

    def sample_ids(self, start: int, count: int) -> np.ndarray:
        """Ids of samples ``start .. start + count - 1`` of the global stream, int64 (count,)."""
        source, place = self._places(np.arange(start, start + count, dtype=np.int64))
        ids = np.empty(count, dtype=np.int64)
        for index in np.unique(source):
            mine = source == index
            length = int(self.lengths[index])
            epoch = place[mine] // length
            keys = _key(self.seed, int(index) + 1, epoch)
            ids[mine] = permute(place[mine] % length, length, keys) + self.offsets[index]
        return ids

    def _places(self, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source of each global place, and the place in that source's own stream; both int64 like ``stream``."""
        if len(self.quotas) == 1:
            return np.zeros_like(stream), stream
        block, slot = np.divmod(stream, self._block)
        slot = permute(slot, self._block, _key(self.seed, 0, block))
        source = np.searchsorted(self._ends, slot, side="right")
        return source, block * self.quotas[source] + slot - (self._ends - self.quotas)[source]


def block_quotas(weights: Sequence[float]) -> np.ndarray:
    """Places of each source in a block, int64: in proportion to ``weights`` within ``QUOTA_ERROR``, each at least 1."""
    shares = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(shares).all() and (shares > 0).all()):
        raise ConfigError(
            f"data.sources weights {list(weights)} must be numbers above 0. Leave out a source to drop it."
        )
    shares = shares / math.fsum(shares)
    if len(shares) == 1:
        return np.ones(1, dtype=np.int64)
    size = MIN_BLOCK
    while size <= MAX_BLOCK:
        quotas = np.floor(shares * size).astype(np.int64)
        # largest remainders first; equal remainders by position
        rest = np.argsort(-(shares * size - quotas), kind="stable")[: size - int(quotas.sum())]
        quotas[rest] += 1
        if (np.abs(quotas / size - shares) <= QUOTA_ERROR * shares).all():
            return quotas
        size *= 2
    raise ConfigError(
        f"data.sources weights {list(weights)}: the smallest share is {shares.min():.2g}, and a mixture keeps shares "
        f"from about {1 / (MAX_BLOCK * QUOTA_ERROR):.2g} on. Raise the smallest weight, or leave that source out."
    )


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of ``0 .. 2**bits - 1``: halves take turns to be changed by a hash of the other one."""
    low_bits = bits // 2
    shift, low_mask = np.uint64(low_bits), np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << (bits - low_bits)) - 1)
    high, low = values >> shift, values & low_mask
    for turn in range(ROUNDS):
        round_keys = _mix(keys + np.uint64((turn + 1) * int(_GOLDEN) & 0xFFFFFFFFFFFFFFFF))
        if turn % 2:
            high = high ^ (_mix(low ^ round_keys) & high_mask)
        else:
            low = low ^ (_mix(high ^ round_keys) & low_mask)
    return (high << shift) | low


def _key(seed: int, stream: int, number: np.ndarray) -> np.ndarray:
    """uint64 key for each ``number`` (epoch or block) of one stream of one seed."""
    start = np.asarray([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    mixed = _mix(_mix(start + _GOLDEN) ^ np.uint64(stream))
    return _mix(mixed + _GOLDEN * number.astype(np.uint64))


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values, one to one."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
