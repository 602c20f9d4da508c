"""Windows over tokens: what a sample is, across shards and sources, and where documents start in it."""

import numpy as np
import pytest
import torch

from data.samples import IGNORE, TokenDataset
from data.shards import ShardError, TokenFiles


@pytest.mark.parametrize("shard_tokens", [5, 8, 9, 1000])
@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (33, 4)])
def test_samples_overlap_by_one_token(tokens, samples, shard_tokens, write_split):
    dataset = TokenDataset([write_split(np.arange(tokens), 300, shard_tokens)], 8)
    assert len(dataset) == samples and dataset.tokens == tokens
    expected = [np.arange(8 * number, 8 * number + 9) for number in range(samples)]
    gathered = dataset.gather(np.arange(samples))
    assert gathered.dtype == np.int64 and gathered.shape == (samples, 9)
    assert gathered.tolist() == [window.tolist() for window in expected]


def test_every_token_but_the_first_is_a_label_once_per_epoch(write_split):
    dataset = TokenDataset([write_split(np.arange(65), 300, 30)], 8, seed=3)
    batch = dataset.batch(dataset.order.sample_ids(0, 8), 0)
    assert sorted(batch.labels.flatten().tolist()) == list(range(1, 65))
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64 and batch.tokens.is_contiguous()


def test_ids_of_several_sources_follow_each_other(write_split):
    dataset = TokenDataset([write_split(np.arange(17)), write_split(np.arange(100, 125))], 8, [1.0, 1.0])
    assert dataset.lengths == [2, 3] and len(dataset) == 5
    assert dataset.gather(np.array([0, 1, 2, 4]))[:, 0].tolist() == [0, 8, 100, 116]
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=f"sample {wrong} of 5"):
            dataset.gather(np.array([wrong]))


def test_id_outside_the_vocabulary_is_named_with_file_and_offset(write_split):
    files = write_split(np.arange(33), 60, 16)
    path = files.folder / "00001.bin"
    content = np.fromfile(path, dtype="<u2")
    # token 16 + 8 = 24: first of one sample and last label of the one before
    content[8] = 60
    content.tofile(path)
    dataset = TokenDataset([TokenFiles.open(files.folder)], 8)
    for read in (dataset.gather, lambda ids: dataset.batch(ids, 0)):
        for sample in (2, 3):
            with pytest.raises(ShardError, match=r"token id 60 .*00001\.bin, token 8 "):
                read(np.array([0, sample]))
        read(np.array([0, 1]))


def test_positions_restart_where_documents_start(write_split):
    files = write_split(np.arange(21), lengths=[3, 5, 4, 9])
    dataset = TokenDataset([files], 5, document_mask=True)
    batch = dataset.batch(np.array([0, 1, 2, 3]), 0)
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1], [0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    plain = TokenDataset([files], 5).batch(np.array([0]), 0)
    assert plain.positions is None and plain.labels.tolist() == [[1, 2, 3, 4, 5]]
    # the first token of a document is not for the one before to predict
    assert batch.labels.tolist() == [
        [1, 2, IGNORE, 4, 5],
        [6, 7, IGNORE, 9, 10],
        [11, IGNORE, 13, 14, 15],
        [16, 17, 18, 19, 20],
    ]
