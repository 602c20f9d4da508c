"""From prepared tokens to batches: the checks before the first step, who gets which rows, and reading ahead.

Decided here: everything that can be wrong with prepared data is found by ``open_data``, with one message that names
the key, the numbers and the fix. Global batch k holds samples ``[k*G, (k+1)*G)`` of ``data.order``, and rank r takes
rows ``[r*B, (r+1)*B)`` of it: the position of a run is one integer, and world size, microbatch and prefetch only cut
the same batch differently. Held-out tokens are read in their own order, each one a label exactly once over all ranks.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.checks import ConfigError
from conf.schema import DataConfig
from data.folder import PreparedFolder, open_folder, prepare_command
from data.samples import IGNORE, Batch, TokenDataset
from data.shards import check_ids
from data.tokenizer import Tokenizer

# ids of this many samples are computed at a time: a permutation costs the same for 1 id and for a few hundred
ORDER_CHUNK = 4096
# how long the consumer waits before it looks whether the reading thread is still there
POLL_SECONDS = 1.0


@dataclass
class Data:
    """The data of a run. ``val`` is None where nothing is held out. ``identity`` holds plain values only."""

    tokenizer: Tokenizer
    train: TokenDataset
    val: TokenDataset | None
    identity: dict[str, Any]


def open_data(config: DataConfig, seq_len: int, model_vocab: int, seed: int) -> Data:
    """Open what ``data.prepare`` wrote and check that this model can train on it.

    Args: ``seq_len`` tokens of a sample; ``model_vocab`` entries of the embedding; ``seed`` of the sample order.
    ConfigError: folder missing or not prepared, tokenizers that differ between sources, a vocabulary larger than the
    model's, a source shorter than one sample. ShardError (a ValueError): files that do not match their sidecar.
    """
    paths, weights = _folders(config)
    folders = [open_folder(path, prepare_command(config, path)) for path in paths]
    _check_tokenizers(folders, model_vocab)
    for folder in folders:
        _check_length(folder, seq_len)
        if config.verify:
            for files in filter(None, (folder.train, folder.val)):
                files.verify()
    train = TokenDataset([folder.train for folder in folders], seq_len, weights, seed, config.document_mask)
    # builds the mixture once, so that weights that cannot be kept are found here
    train.order.sample_ids(0, 1)
    held_out = [folder.val for folder in folders if folder.val is not None and len(folder.val) > 1]
    val = TokenDataset(held_out, seq_len, document_mask=config.document_mask) if held_out else None
    return Data(folders[0].tokenizer, train, val, _identity(folders, weights, seq_len))


def check_identity(step: int, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if the checkpoint of ``step`` was trained on other data than this run has; paths may
    differ."""
    if changes := identity_changes(saved, current):
        raise ConfigError(
            f"the checkpoint of step {step} was trained on other data: {'; '.join(changes)}. "
            "Restore that data, or set another run.dir to start anew."
        )


def identity_changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """What differs between the identity in a checkpoint and that of this run, as sentences; paths may differ."""
    changes = [
        f"data {key}: {saved.get(key)} in the checkpoint, {current[key]} now"
        for key in ("tokenizer", "vocab_size", "seq_len")
        if saved.get(key) != current[key]
    ]
    before, now = saved.get("sources", []), current["sources"]
    if len(before) != len(now):
        changes.append(f"data sources: {len(before)} in the checkpoint, {len(now)} now")
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        changes += [
            f"data source {number} ({new['path']}) {key}: {old.get(key)} in the checkpoint, {new[key]} now"
            for key in ("checksum", "weight", "tokens")
            if old.get(key) != new[key]
        ]
    return changes


class Loader:
    """Endless iterator over this rank's rows of the global batches, read ahead by a background thread.

    ``start_sample`` is the global position in samples; any integer continues the stream there. ``prefetch`` batches
    are read ahead; ``pin`` puts them into pinned memory (needs CUDA). ``wait_seconds`` is how long the last ``next()``
    waited for the thread. An error of the thread is raised by ``next()``: a ConfigError (damaged data) as it is,
    another as RuntimeError with its cause; after ``close()`` or an error there are no more batches. ConfigError:
    ``world_size`` does not divide ``global_batch``.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        global_batch: int,
        rank: int,
        world_size: int,
        start_sample: int = 0,
        prefetch: int = 4,
        pin: bool = False,
    ) -> None:
        if global_batch % world_size:
            raise ConfigError(
                f"train.global_batch={global_batch} is not a multiple of {world_size} ranks. Set it to "
                f"{max(1, global_batch // world_size) * world_size}."
            )
        assert 0 <= rank < world_size and start_sample >= 0
        self.wait_seconds = 0.0
        self._dataset = dataset
        self._order = dataset.order
        self._global_batch = global_batch
        self._rows = slice(rank * (global_batch // world_size), (rank + 1) * (global_batch // world_size))
        self._start = start_sample
        self._pin = pin
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=prefetch)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        item = self._take()
        self.wait_seconds = time.perf_counter() - begin
        if isinstance(item, BaseException):
            self.close()
            if isinstance(item, ConfigError):
                # damaged data, which the user can mend: the message stands alone
                raise item
            raise RuntimeError(f"the data loader stopped: {item}") from item
        return item

    def close(self) -> None:
        """Stop the thread and drop what it has read; safe to call twice."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _take(self) -> Batch | BaseException:
        while not self._closed.is_set():
            try:
                return self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    return RuntimeError("its thread ended without a reason")
        raise StopIteration

    def _read(self) -> None:
        try:
            per_chunk = max(1, ORDER_CHUNK // self._global_batch)
            while not self._closed.is_set():
                ids = self._order.sample_ids(self._start, per_chunk * self._global_batch)
                for batch_ids in ids.reshape(per_chunk, self._global_batch):
                    index = self._start // self._global_batch
                    batch = self._dataset.batch(batch_ids[self._rows], index, self._pin)
                    self._start += self._global_batch
                    self._queue.put(batch)
                    if self._closed.is_set():
                        return
        except BaseException as error:  # whatever it is, the consumer must hear of it
            self._queue.put(error)


def eval_batches(
    dataset: TokenDataset, rows: int, rank: int, world_size: int, limit_tokens: int | None = None
) -> Iterator[Batch]:
    """Every held-out token as a label exactly once over all ranks, in an order that depends on nothing.

    Args: ``rows`` sequences of a batch on each rank; ``limit_tokens`` stops after this many labels, shared by the
    sources in proportion to their size (None: all). The first token of a source has no predecessor and is no label.
    Every rank gets the same number of batches; rows without a sample have id -1 and labels -100, as has what is missing
    at the end of the last window. No thread, and nothing of the training stream is touched.
    """
    windows = _eval_windows(dataset, limit_tokens)
    per_batch = rows * world_size
    for index in range(-(-len(windows) // per_batch)):
        first = index * per_batch + rank * rows
        yield _eval_batch(dataset, windows[first : first + rows], rows, first, index)


def _eval_windows(dataset: TokenDataset, limit_tokens: int | None) -> list[tuple[int, int, int]]:
    """(source, first token, labels) of every window of the evaluation."""
    available = [max(0, len(files) - 1) for files in dataset.sources]
    total = sum(available)
    limit = total if limit_tokens is None else min(limit_tokens, total)
    windows, before = [], 0
    for source, labels in enumerate(available):
        # shares of whole tokens that add up to the limit
        upto = limit * (sum(available[:source]) + labels) // total if total else 0
        wanted, before = upto - before, upto
        for start in range(0, wanted, dataset.seq_len):
            windows.append((source, start, min(dataset.seq_len, wanted - start)))
    return windows


def _eval_batch(dataset: TokenDataset, windows: list[tuple[int, int, int]], rows: int, first: int, index: int) -> Batch:
    seq_len = dataset.seq_len
    tokens, labels = np.zeros((rows, seq_len), np.int64), np.full((rows, seq_len), IGNORE, np.int64)
    positions = np.tile(np.arange(seq_len), (rows, 1)) if dataset.document_mask else None
    ids = np.full(rows, -1, np.int64)
    for row, (source, start, length) in enumerate(windows):
        window = dataset.sources[source].window(start, length + 1)
        check_ids(window, dataset.vocab_size, dataset.sources[source].locate(start))
        tokens[row, :length], labels[row, :length] = window[:-1], window[1:]
        ids[row] = first + row
        if positions is not None:
            positions[row, :length] = dataset.mask_documents(source, start, labels[row, :length])
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        ids,
        index,
        None if positions is None else torch.from_numpy(positions),
    )


def _folders(config: DataConfig) -> tuple[list[Path], list[float]]:
    if config.kind != "tokens":
        return [Path(config.dir).absolute()], [1.0]
    if config.sources:
        return [Path(source.path).absolute() for source in config.sources], [s.weight for s in config.sources]
    if config.path is None:
        raise ConfigError("data=tokens needs data.path (a prepared folder) or data.sources. Set one of them.")
    return [Path(config.path).absolute()], [1.0]


def _check_tokenizers(folders: list[PreparedFolder], model_vocab: int) -> None:
    first = folders[0]
    for folder in folders[1:]:
        if folder.tokenizer.hash != first.tokenizer.hash:
            raise ConfigError(
                f"data.sources {first.path} and {folder.path} were prepared with different tokenizers. Prepare them "
                f"with the same one: data.tokenizer={first.tokenizer.path}"
            )
    if first.tokenizer.vocab_size > model_vocab:
        raise ConfigError(
            f"model.vocab_size={model_vocab} is smaller than the tokenizer's {first.tokenizer.vocab_size} "
            f"({first.tokenizer.path}). Set model.vocab_size={first.tokenizer.vocab_size} or more."
        )


def _check_length(folder: PreparedFolder, seq_len: int) -> None:
    found = len(folder.train)
    if found < seq_len + 1:
        fix = f"Set train.seq_len to {found - 1} or less, or give more text." if found > 1 else "Give more text."
        raise ConfigError(
            f"train.seq_len={seq_len} needs at least {seq_len + 1} training tokens; {folder.path} has {found}. {fix}"
        )


def _identity(folders: list[PreparedFolder], weights: list[float], seq_len: int) -> dict[str, Any]:
    def source(folder: PreparedFolder, weight: float) -> dict[str, Any]:
        files = folder.train
        return {
            "path": str(folder.path),
            "weight": float(weight),
            "checksum": files.sidecar["checksum"],
            "tokens": len(files),
            "documents": files.sidecar["documents"],
            "samples": (len(files) - 1) // seq_len,
            "val_tokens": 0 if folder.val is None else len(folder.val),
        }

    return {
        "tokenizer": folders[0].tokenizer.hash,
        "vocab_size": folders[0].tokenizer.vocab_size,
        "seq_len": seq_len,
        "sources": [source(folder, weight) for folder, weight in zip(folders, weights, strict=True)],
    }
