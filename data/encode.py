"""Documents to token parts: the work of one process, whatever process it is.

A unit of input becomes a part: a flat file of ids and, written last and in one rename, an index with the length and
the content hash of every document and the counts of what was left out. A part with an index is finished and is never
made again. Decided here: where the markers go (exactly one begin and end marker for each document, where asked), and
that an id outside the vocabulary is never written. Which split a document belongs to is decided by ``data.prepare``.
"""

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.synchronize
import os
import signal
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from conf.schema import DataConfig
from data.documents import Counts, Unit, read_unit
from data.shards import check_ids, token_dtype
from data.tokenizer import Tokenizer, load_tokenizer

# characters handed to the tokenizer at a time: bounds the memory for Python's lists of ids
BATCH_CHARS = 1 << 18


@dataclass
class Part:
    """A finished part: ``tokens`` (n,) on disk, ``lengths`` int64 and ``hashes`` uint64 (documents,), ``counts``."""

    tokens: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    counts: Counts


class Stopped(Exception):
    """The unit was given up because another one failed."""


def encode_unit(
    unit: Unit, config: DataConfig, tokenizer: Tokenizer, folder: Path, stop: Callable[[], bool] = lambda: False
) -> int:
    """Write the part of ``unit`` into ``folder``; returns its tokens.

    Raises what ``read_unit`` does, and ``Stopped`` soon after ``stop()`` is true.
    """
    counts = Counts()
    dtype = token_dtype(tokenizer.vocab_size)
    lengths: list[np.ndarray] = []
    hashes: list[int] = []
    before = [tokenizer.bos_id] if config.add_bos else []
    after = [tokenizer.eos_id] if config.add_eos else []
    assert None not in before + after, "prepare checks that the markers exist"
    path = _tokens_path(folder, unit.index)
    with open(path, "wb") as file:
        for texts in _batches(read_unit(unit, config, counts)):
            if stop():
                raise Stopped
            hashes += [content_hash(text) for text in texts]
            documents = [before + ids + after for ids in tokenizer.encode_batch(texts)]
            sizes = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
            tokens = np.fromiter(chain.from_iterable(documents), dtype=np.int64, count=int(sizes.sum()))
            check_ids(tokens, tokenizer.vocab_size, f"the output of {tokenizer.path}")
            file.write(tokens.astype(dtype).tobytes())
            lengths.append(sizes)
    all_lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
    _write_index(
        _index_path(folder, unit.index), all_lengths, np.array(hashes, dtype=np.uint64), counts, dtype.itemsize
    )
    return int(all_lengths.sum())


def is_finished(folder: Path, index: int) -> bool:
    """Whether the part of unit ``index`` is there, whole."""
    try:
        with np.load(_index_path(folder, index)) as stored:
            tokens = int(stored["lengths"].sum())
            itemsize = int(stored["itemsize"])
        return _tokens_path(folder, index).stat().st_size == tokens * itemsize
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        # not there, or cut by a crash of the machine: made again
        return False


def read_part(folder: Path, index: int, vocab_size: int) -> Part:
    """Open a finished part."""
    with np.load(_index_path(folder, index)) as stored:
        lengths, hashes = stored["lengths"], stored["hashes"]
        report = json.loads(bytes(stored["counts"]))
    dtype = token_dtype(vocab_size)
    path = _tokens_path(folder, index)
    # an empty file cannot be mapped
    tokens = np.memmap(path, dtype=dtype, mode="r") if lengths.sum() else np.zeros(0, dtype)
    counts = Counts()
    counts.totals.update(report["totals"])
    counts.fields.update(report["fields"])
    return Part(tokens, lengths, hashes, counts)


def content_hash(text: str) -> int:
    """64 bits that depend on the text alone: equal documents have equal hashes, on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def start_worker(config: DataConfig, parts: Path, stop: multiprocessing.synchronize.Event) -> None:
    """Initialise a worker process: load the tokenizer of ``parts``, and end when the parent ends, however it ends."""
    global _worker
    # an interrupt from the keyboard reaches every process of the terminal; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = (config, load_tokenizer(parts), parts, stop.is_set)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def work(unit: Unit) -> int:
    """``encode_unit`` in a worker process."""
    assert _worker is not None, "start_worker runs first"
    config, tokenizer, parts, stop = _worker
    return encode_unit(unit, config, tokenizer, parts, stop)


_worker: tuple[DataConfig, Tokenizer, Path, Callable[[], bool]] | None = None


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_index(path: Path, lengths: np.ndarray, hashes: np.ndarray, counts: Counts, itemsize: int) -> None:
    report = json.dumps({"totals": counts.totals, "fields": sorted(counts.fields)}).encode()
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        np.savez(
            file,
            lengths=lengths,
            hashes=hashes,
            counts=np.frombuffer(report, dtype=np.uint8),
            itemsize=itemsize,
        )
    os.replace(beside, path)


def _tokens_path(folder: Path, index: int) -> Path:
    return folder / f"{index:06d}.bin"


def _index_path(folder: Path, index: int) -> Path:
    return folder / f"{index:06d}.npz"
