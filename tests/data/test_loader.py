"""Who gets which rows, in which order, and what happens when reading goes wrong."""

import time

import numpy as np
import pytest
import torch

from conf.checks import ConfigError
from data.loader import Loader, eval_batches
from data.samples import IGNORE, TokenDataset
from data.shards import ShardError, TokenFiles
from tests.spawn import run_ranks

SEQ = 8


@pytest.fixture
def dataset(write_split):
    """64 samples; token i has the value i, so a row shows where it comes from."""
    return TokenDataset([write_split(np.arange(64 * SEQ + 1), 1000, 100)], SEQ, seed=1)


def take(dataset, global_batch, batches, rank=0, world_size=1, start=0):
    loader = Loader(dataset, global_batch, rank, world_size, start)
    try:
        return [next(loader) for _ in range(batches)]
    finally:
        loader.close()


def global_ids(dataset, global_batch, batches, world_size, start=0):
    """Ids of each global batch, put together from the ranks."""
    ranks = [take(dataset, global_batch, batches, rank, world_size, start) for rank in range(world_size)]
    return [np.concatenate([ranks[rank][k].sample_ids for rank in range(world_size)]).tolist() for k in range(batches)]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_world_size_cuts_the_same_batches(dataset, world_size):
    assert global_ids(dataset, 8, 20, world_size) == global_ids(dataset, 8, 20, 1)


def test_rows_are_the_samples_of_their_ids(dataset):
    for batch in take(dataset, 6, 5, 1, 3, 4):
        assert batch.tokens.shape == batch.labels.shape == (2, SEQ)
        assert batch.tokens[:, 0].tolist() == (batch.sample_ids * SEQ).tolist()
        assert torch.equal(batch.labels, batch.tokens + 1)


def test_an_epoch_is_disjoint_and_complete_and_the_next_one_reshuffled(dataset):
    # exactly 8 batches to an epoch: stopping at its end neither repeats nor drops one
    ids = global_ids(dataset, 8, 20, 2)
    assert sorted(sum(ids[:8], [])) == sorted(sum(ids[8:16], [])) == list(range(64))
    assert ids[:8] != ids[8:16]
    for stop in (7, 8, 9, 16):
        assert global_ids(dataset, 8, 20 - stop, 2, start=8 * stop) == ids[stop:]


@pytest.mark.parametrize(("world_size", "global_batch"), [(1, 8), (4, 8), (2, 4), (1, 5)])
def test_position_is_one_integer(dataset, world_size, global_batch):
    # stopped after 10 batches of 8 on 2 ranks: any other cut goes on at sample 80
    stream = sum(global_ids(dataset, 8, 40, 2), [])
    resumed = sum(global_ids(dataset, global_batch, 12, world_size, start=80), [])
    assert resumed == stream[80 : 80 + len(resumed)]


def read_rank(rank, world_size, folder):
    dataset = TokenDataset([TokenFiles.open(folder)], SEQ, seed=1)
    return [batch.sample_ids.tolist() for batch in take(dataset, 8, 8, rank, world_size)]


def test_processes_read_disjoint_rows(dataset):
    ids = run_ranks(2, read_rank, dataset.sources[0].folder)
    assert sorted(sum(ids[0] + ids[1], [])) == list(range(64))


def test_global_batch_that_does_not_divide(dataset):
    with pytest.raises(ConfigError, match=r"train.global_batch=8 is not a multiple of 3 ranks. Set it to 6"):
        Loader(dataset, 8, 0, 3)


def test_reads_ahead_and_no_further_and_reports_the_wait(dataset, monkeypatch):
    made = []
    batch = dataset.batch

    def slow(*args):
        time.sleep(0.05)
        made.append(args[1])
        return batch(*args)

    monkeypatch.setattr(dataset, "batch", slow)
    loader = Loader(dataset, 8, 0, 1, prefetch=2)
    next(loader)
    assert 0.03 < loader.wait_seconds < 1.0
    time.sleep(0.5)
    # taken 1, queued 2, and one in the thread's hand
    assert made == [0, 1, 2, 3]
    next(loader)
    assert loader.wait_seconds < 0.03
    loader.close()


def test_error_of_the_thread_reaches_the_consumer_with_its_cause(dataset, monkeypatch):
    batch = dataset.batch

    def failing(ids, index, pin):
        if index == 2:
            raise OSError("the disk is gone")
        return batch(ids, index, pin)

    monkeypatch.setattr(dataset, "batch", failing)
    loader = Loader(dataset, 8, 0, 1)
    assert [next(loader).index, next(loader).index] == [0, 1]
    with pytest.raises(RuntimeError, match="the data loader stopped: the disk is gone") as error:
        next(loader)
    assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(StopIteration):
        next(loader)


def test_damaged_data_is_told_in_its_own_words(dataset, monkeypatch):
    def damaged(ids, index, pin):
        raise ShardError("token id 46900 lies outside the vocabulary")

    monkeypatch.setattr(dataset, "batch", damaged)
    with pytest.raises(ShardError, match="^token id 46900 lies outside the vocabulary$"):
        next(Loader(dataset, 8, 0, 1))


def test_a_thread_that_is_gone_is_noticed(dataset, monkeypatch):
    monkeypatch.setattr("data.loader.POLL_SECONDS", 0.05)
    monkeypatch.setattr(Loader, "_read", lambda self: None)
    with pytest.raises(RuntimeError, match="its thread ended without a reason"):
        next(Loader(dataset, 8, 0, 1))


def test_close_stops_the_thread_while_it_waits_for_room(dataset):
    loader = Loader(dataset, 8, 0, 1, prefetch=1)
    next(loader)
    time.sleep(0.1)
    loader.close()
    loader.close()
    assert not loader._thread.is_alive()
    with pytest.raises(StopIteration):
        next(loader)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 100, 129])
def test_eval_labels_every_token_once_with_equal_batches_on_every_rank(tokens, rows, world_size, write_split):
    held_out = TokenDataset([write_split(np.arange(tokens), 1000, 30)], SEQ)
    ranks = [list(eval_batches(held_out, rows, rank, world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1 and ranks[0]
    labels = torch.cat([batch.labels.flatten() for batches in ranks for batch in batches])
    assert sorted(labels[labels != IGNORE].tolist()) == list(range(1, tokens))
    for batch in sum(ranks, []):
        assert batch.tokens.shape == batch.labels.shape == (rows, SEQ)
        real = batch.labels != IGNORE
        assert torch.equal(batch.labels[real], batch.tokens[real] + 1)
        assert ((batch.sample_ids == -1) == ~real.any(1).numpy()).all()


@pytest.mark.parametrize("limit", [1, 8, 11, 96, 1000])
def test_eval_limit_counts_labels(limit, write_split):
    held_out = TokenDataset([write_split(np.arange(65)), write_split(np.arange(33) + 100)], SEQ)
    batches = [batch for rank in range(2) for batch in eval_batches(held_out, 3, rank, 2, limit)]
    labels = torch.cat([batch.labels.flatten() for batch in batches])
    labels = labels[labels != IGNORE].tolist()
    assert len(labels) == len(set(labels)) == min(limit, 96)
    # sources share the limit by size, from their beginnings
    assert sum(label < 100 for label in labels) == min(limit, 96) * 64 // 96


def test_eval_twice_is_equal_and_leaves_the_training_stream_alone(dataset, write_split):
    held_out = TokenDataset([write_split(np.arange(100))], SEQ)
    undisturbed = [batch.sample_ids.tolist() for batch in take(dataset, 8, 6)]
    loader = Loader(dataset, 8, 0, 1)
    seen, rounds = [], []
    for _ in range(3):
        seen += [next(loader).sample_ids.tolist(), next(loader).sample_ids.tolist()]
        rounds.append(torch.cat([batch.labels for batch in eval_batches(held_out, 2, 0, 1, 50)]))
    loader.close()
    assert seen == undisturbed
    assert torch.equal(rounds[0], rounds[1]) and torch.equal(rounds[1], rounds[2])


def test_eval_positions_follow_documents(write_split):
    held_out = TokenDataset([write_split(np.arange(12), lengths=[5, 7])], SEQ, document_mask=True)
    (batch,) = eval_batches(held_out, 2, 0, 1)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.labels.tolist() == [[1, 2, 3, 4, IGNORE, 6, 7, 8], [9, 10, 11] + [IGNORE] * 5]
