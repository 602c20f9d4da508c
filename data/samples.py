"""What a sample is: fixed windows over the tokens of one or several sources.

Decided here: sample i of a source is the ``seq_len + 1`` consecutive tokens from ``i * seq_len`` on in the
concatenation of its shards, so that every token but a source's first is a label once per epoch (up to an incomplete
last window). Windows do not stop at documents; with ``data.document_mask`` positions restart where a document starts,
and its first token is no label, since nothing in the document before should predict it. The order of samples is
``data.order``'s, which rank gets which rows is ``data.loader``'s.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from data.order import SampleOrder
from data.shards import TokenFiles, check_ids

IGNORE = -100
"""Label that the loss leaves out."""


@dataclass
class Batch:
    """One rank's rows of one global batch. ``tokens``, ``labels`` int64 (rows, seq_len), on CPU.

    ``labels[i, t]`` is the token after ``tokens[i, t]``, or -100 where there is nothing to predict. ``sample_ids``
    int64 numpy (rows,), -1 for a row without a sample. ``index`` counts global batches from sample 0. ``positions``
    int64 (rows, seq_len), restarting at 0 where a document starts; None without ``data.document_mask``.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    sample_ids: np.ndarray
    index: int
    positions: torch.Tensor | None = None

    def split(self, parts: int, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Tokens, labels and positions of ``parts`` microbatches, whose rows differ by at most one, on ``device``."""
        tokens, labels, positions = (
            None if tensor is None else tensor.to(device, non_blocking=True).tensor_split(parts)
            for tensor in (self.tokens, self.labels, self.positions)
        )
        assert tokens is not None and labels is not None
        return list(zip(tokens, labels, positions or [None] * parts, strict=True))


class TokenDataset:
    """Samples over the splits of one or several sources, with the order in which training reads them.

    ``order`` is the stream of sample ids; ``len()`` the number of samples of one epoch of every source. ShardError is
    raised while reading if a file holds an id outside its vocabulary, with file and offset.
    """

    def __init__(
        self,
        sources: list[TokenFiles],
        seq_len: int,
        weights: list[float] | None = None,
        seed: int = 0,
        document_mask: bool = False,
    ) -> None:
        self.sources = sources
        self.seq_len = seq_len
        self.vocab_size = sources[0].sidecar["vocab_size"]
        self.document_mask = document_mask
        self.lengths = [max(0, (len(files) - 1) // seq_len) for files in sources]
        self._offsets = [0, *accumulate(self.lengths)]
        self._weights = weights or [1.0] * len(sources)
        self._seed = seed

    @property
    def order(self) -> SampleOrder:
        """The endless stream of sample ids; a function of lengths, weights and seed."""
        return SampleOrder(self.lengths, self._weights, self._seed)

    @property
    def tokens(self) -> int:
        """Tokens of all sources together."""
        return sum(len(files) for files in self.sources)

    def __len__(self) -> int:
        return self._offsets[-1]

    def locate(self, sample_id: int) -> tuple[int, int]:
        """Source number and first token position of a sample."""
        if not 0 <= sample_id < self._offsets[-1]:
            raise IndexError(f"sample {sample_id} of {len(self)}")
        source = bisect_right(self._offsets, sample_id) - 1
        return source, (sample_id - self._offsets[source]) * self.seq_len

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """The samples of ``ids`` (n,): int64 (n, seq_len + 1)."""
        out = np.empty((len(ids), self.seq_len + 1), dtype=np.int64)
        for row, (source, start) in enumerate(map(self.locate, np.asarray(ids).tolist())):
            out[row] = self.sources[source].window(start, self.seq_len + 1)
        self._check(ids, out)
        return out

    def positions(self, source: int, start: int, length: int) -> np.ndarray:
        """Position of each of ``length`` tokens from ``start`` on within its document or, for the first, the window."""
        documents = self.sources[source].documents
        first, last = np.searchsorted(documents, [start, start + length])
        starts = np.zeros(length, dtype=np.int64)
        inside = np.asarray(documents[first:last]) - start
        starts[inside] = inside
        return np.arange(length) - np.maximum.accumulate(starts)

    def mask_documents(self, source: int, start: int, labels: np.ndarray) -> np.ndarray:
        """Positions (n,) of the ``n`` tokens from ``start`` on; sets ``labels`` (n,) to IGNORE where the next token
        starts a document: nothing in this one predicts it."""
        positions = self.positions(source, start, len(labels) + 1)
        labels[positions[1:] == 0] = IGNORE
        return positions[:-1]

    def batch(self, ids: np.ndarray, index: int, pin: bool = False) -> Batch:
        """The rows of ``ids`` as a ``Batch``; ``pin`` puts the tensors into pinned memory (needs CUDA)."""
        shape = (len(ids), self.seq_len)
        tokens = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
        labels = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
        positions = torch.empty(shape, dtype=torch.int64, pin_memory=pin) if self.document_mask else None
        into, labels_into = tokens.numpy(), labels.numpy()
        for row, (source, start) in enumerate(map(self.locate, np.asarray(ids).tolist())):
            # widened straight into both: a copy of whole windows in between costs a third of the rate
            window = self.sources[source].window(start, self.seq_len + 1)
            into[row], labels_into[row] = window[:-1], window[1:]
            if positions is not None:
                positions.numpy()[row] = self.mask_documents(source, start, labels_into[row])
        self._check(ids, into)
        self._check(ids, labels_into[:, -1:], self.seq_len)
        return Batch(tokens, labels, np.asarray(ids), index, positions)

    def _check(self, ids: np.ndarray, values: np.ndarray, column: int = 0) -> None:
        """ShardError naming file and offset if ``values``, from ``column`` of the windows on, are no ids."""
        # one pass over the batch; which value is wrong is only looked for when one is
        if values.size == 0 or int(values.max()) < self.vocab_size:
            return
        row, offset = np.argwhere(values >= self.vocab_size)[0]
        source, start = self.locate(int(ids[row]))
        where = self.sources[source].locate(start + column + int(offset))
        check_ids(values[row, offset : offset + 1], self.vocab_size, where)
