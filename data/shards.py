"""Token shards: flat files of ids with one JSON sidecar per split, written whole and read through memory maps.

A split is a folder::

    shards.json        the sidecar: format version, dtype, counts, tokenizer hash, vocabulary, checksums
    documents.npy      int64 (documents,): token offset of the start of each document in the whole split
    00000.bin ...      little-endian ids, uint16 where the vocabulary has at most 65,536 entries, else uint32

Decided here: the format and every check on it. Opening a split compares format, dtype, sizes and counts (cheap,
whatever the size of the data); ``verify`` reads everything and compares checksums. What a sample is, and in which order
samples come, is decided in ``data.samples`` and ``data.order``.
"""

import hashlib
import json
import os
import shutil
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from conf.checks import ConfigError

FORMAT = 1
SIDECAR = "shards.json"
DOCUMENTS = "documents.npy"
# ids are checked and hashed in pieces of this many while they are written or verified
PIECE_TOKENS = 1 << 22


class ShardError(ConfigError):
    """Token files that do not match their sidecar, or cannot be used. The message names the file."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type on disk that holds every id below ``vocab_size``."""
    if not 1 <= vocab_size <= 1 << 32:
        raise ShardError(f"a vocabulary of {vocab_size} ids cannot be stored (1 to {1 << 32}).")
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def check_ids(ids: np.ndarray, vocab_size: int, where: str) -> None:
    """ShardError if one of ``ids`` (any integer type) is outside ``0 .. vocab_size - 1``; ``where`` names them."""
    if ids.size == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        position = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise ShardError(
            f"token id {int(ids[position])} at position {position} of {where} lies outside the vocabulary "
            f"(0 to {vocab_size - 1}). The tokenizer and the tokens do not belong together."
        )


class ShardWriter:
    """Writes one split. Nothing appears as ``folder`` before ``close``; a writer that dies leaves ``<folder>.tmp``."""

    def __init__(self, folder: Path, vocab_size: int, tokenizer_hash: str, shard_tokens: int) -> None:
        self.folder = folder
        self.dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._tokenizer_hash = tokenizer_hash
        self._shard_tokens = shard_tokens
        self._work = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        self._shards: list[dict[str, Any]] = []
        self._lengths: list[np.ndarray] = []
        self._file: Any = None
        self._hash: Any = None
        self._left = 0

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add whole documents: ``tokens`` (n,) any integer type, ``lengths`` (documents,) that sum to n.

        ShardError: an id outside the vocabulary; nothing of this call is written then.
        """
        assert int(lengths.sum()) == tokens.size, "document lengths must cover the tokens"
        check_ids(tokens, self._vocab_size, f"the tokens for {self.folder}")
        self._lengths.append(np.asarray(lengths, dtype=np.int64))
        tokens = tokens.astype(self.dtype, copy=False)
        while tokens.size:
            if self._left == 0:
                self._next_shard()
            part, tokens = tokens[: self._left], tokens[self._left :]
            content = part.tobytes()
            self._file.write(content)
            self._hash.update(content)
            self._left -= part.size
            self._shards[-1]["tokens"] += part.size

    def close(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Finish the split, write the sidecar with ``counts`` in it, move it into place; returns the sidecar."""
        self._finish_shard()
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        starts = np.cumsum(lengths) - lengths
        with open(self._work / DOCUMENTS, "wb") as file:
            np.save(file, starts)
            _sync(file)
        sidecar = {
            "format": FORMAT,
            "dtype": self.dtype.name,
            "vocab_size": self._vocab_size,
            "tokenizer_hash": self._tokenizer_hash,
            "tokens": int(lengths.sum()),
            "documents": int(lengths.size),
            "documents_sha256": _file_hash(self._work / DOCUMENTS),
            "counts": counts,
            "shards": self._shards,
        }
        sidecar["checksum"] = split_checksum(sidecar)
        write_json(self._work / SIDECAR, sidecar)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.replace(self._work, self.folder)
        return sidecar

    def _next_shard(self) -> None:
        self._finish_shard()
        name = f"{len(self._shards):05d}.bin"
        self._file = open(self._work / name, "wb")  # noqa: SIM115  (closed by _finish_shard)
        self._hash = hashlib.sha256()
        self._left = self._shard_tokens
        self._shards.append({"file": name, "tokens": 0})

    def _finish_shard(self) -> None:
        if self._file is not None:
            _sync(self._file)
            self._file.close()
            self._shards[-1]["sha256"] = self._hash.hexdigest()
            self._file = None


@dataclass
class TokenFiles:
    """One split, open for reading. ``starts[i]`` is the position of the first token of shard i in the whole split."""

    folder: Path
    sidecar: dict[str, Any]
    shards: list[np.ndarray]
    documents: np.ndarray
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = [0, *accumulate(shard.size for shard in self.shards)]

    @classmethod
    def open(cls, folder: Path) -> "TokenFiles":
        """Open a split and compare its files with the sidecar. ShardError names the file and what is wrong."""
        sidecar = read_sidecar(folder)
        dtype = np.dtype(sidecar["dtype"]).newbyteorder("<")
        shards = []
        for entry in sidecar["shards"]:
            path = folder / entry["file"]
            size = path.stat().st_size if path.is_file() else None
            wanted = entry["tokens"] * dtype.itemsize
            if size != wanted:
                found = "does not exist" if size is None else f"has {size} bytes"
                raise ShardError(
                    f"{path} {found}, and its sidecar says {entry['tokens']} tokens of {dtype.name} = {wanted} bytes. "
                    "The file is cut, or was written with another dtype: prepare the data again."
                )
            # a plain view of the map: slicing the memmap class itself takes several times as long
            shards.append(np.asarray(np.memmap(path, dtype=dtype, mode="r")))
        try:
            documents = np.asarray(np.load(folder / DOCUMENTS, mmap_mode="r"))
        except (OSError, ValueError) as error:
            raise ShardError(f"{folder / DOCUMENTS} cannot be read ({error}). Prepare the data again.") from error
        if documents.shape != (sidecar["documents"],) or documents.dtype != np.int64:
            raise ShardError(
                f"{folder / DOCUMENTS} holds {documents.shape} {documents.dtype}, and the sidecar says "
                f"{sidecar['documents']} documents (int64). Prepare the data again."
            )
        return cls(folder, sidecar, shards, documents)

    def __len__(self) -> int:
        return self.starts[-1]

    def window(self, start: int, length: int) -> np.ndarray:
        """Tokens ``start .. start + length`` of the split, in the type on disk; a view unless they cross shards."""
        assert 0 <= start and 0 < length and start + length <= self.starts[-1], "window outside the split"
        shard = bisect_right(self.starts, start) - 1
        offset = start - self.starts[shard]
        part = self.shards[shard][offset : offset + length]
        if part.size == length:
            return part
        return np.concatenate([part, self.window(start + part.size, length - part.size)])

    def locate(self, position: int) -> str:
        """File and offset of a token position, for messages."""
        shard = bisect_right(self.starts, position) - 1
        return f"{self.folder / self.sidecar['shards'][shard]['file']}, token {position - self.starts[shard]}"

    def verify(self) -> None:
        """Read everything: checksums, and every id against the vocabulary. ShardError names the first wrong file."""
        for entry, shard in zip(self.sidecar["shards"], self.shards, strict=True):
            path = self.folder / entry["file"]
            digest = hashlib.sha256()
            for start in range(0, shard.size, PIECE_TOKENS):
                piece = shard[start : start + PIECE_TOKENS]
                digest.update(piece.tobytes())
                check_ids(piece, self.sidecar["vocab_size"], f"{path} from token {start}")
            if digest.hexdigest() != entry["sha256"]:
                raise ShardError(f"{path} does not match its checksum: the file is damaged. Prepare the data again.")
        if _file_hash(self.folder / DOCUMENTS) != self.sidecar["documents_sha256"]:
            raise ShardError(f"{self.folder / DOCUMENTS} does not match its checksum. Prepare the data again.")


def read_sidecar(folder: Path) -> dict[str, Any]:
    """The checked sidecar of a split. ShardError: missing, damaged, another format version, or contradicting itself."""
    path = folder / SIDECAR
    try:
        sidecar = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ShardError(f"{path} does not exist: {folder} is not a split of prepared tokens.") from None
    except (ValueError, OSError) as error:
        raise ShardError(f"{path} cannot be read ({error}). Prepare the data again.") from error
    if not isinstance(sidecar, dict) or sidecar.get("format") != FORMAT:
        found = sidecar.get("format") if isinstance(sidecar, dict) else None
        raise ShardError(f"{path} has format {found}, this version reads {FORMAT}. Prepare the data again.")
    keys = {"dtype", "vocab_size", "tokenizer_hash", "tokens", "documents", "documents_sha256", "shards", "checksum"}
    if missing := keys - sidecar.keys():
        raise ShardError(f"{path} lacks {', '.join(sorted(missing))}. Prepare the data again.")
    wanted = token_dtype(sidecar["vocab_size"]).name
    if sidecar["dtype"] != wanted:
        raise ShardError(f"{path} says dtype {sidecar['dtype']}; {sidecar['vocab_size']} ids are stored as {wanted}.")
    if sum(entry["tokens"] for entry in sidecar["shards"]) != sidecar["tokens"]:
        raise ShardError(f"{path}: the shards do not add up to {sidecar['tokens']} tokens. Prepare the data again.")
    if split_checksum(sidecar) != sidecar["checksum"]:
        raise ShardError(f"{path} does not match its own checksum: it was edited. Prepare the data again.")
    return sidecar


def split_checksum(sidecar: dict[str, Any]) -> str:
    """sha256 hex over everything that decides the samples: ids, their order, the tokenizer, document starts."""
    parts = [sidecar["dtype"], sidecar["tokenizer_hash"], sidecar["documents_sha256"], str(sidecar["vocab_size"])]
    parts += [f"{entry['tokens']}:{entry['sha256']}" for entry in sidecar["shards"]]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that ``path`` is, at any moment, either the old file or the whole new one."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True)
        file.write("\n")
        _sync(file)
    os.replace(beside, path)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
