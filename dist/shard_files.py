"""How tensors get into and out of the files of ``torch.distributed.checkpoint``.

Decided here: a rank writes one file of the chunks that it owns, hashed while it is written, so that the checksum costs
no second pass over the disk; and the index that torch pickles is read by an unpickler that knows only the index's own
types, so that a checkpoint holds tensors and plain values and cannot run code.
"""

import hashlib
import importlib
import io
import os
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dist.manifest import FileEntry

INDEX_NAME = ".metadata"
# everything that torch's index of tensors is made of; dtypes besides
_INDEX_TYPES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class ChunkPlanner(DefaultSavePlanner):
    """Writes the given chunks, and no tensor of a live model: what it holds may be a private copy.

    ``chunks`` maps a canonical name to (the chunk's place in the whole tensor, the whole tensor's shape, the chunk's
    values on any device). Every chunk is written by exactly one rank.
    """

    def __init__(self, chunks: dict[str, tuple[ChunkStorageMetadata, torch.Size, torch.Tensor]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = chunks

    def create_local_plan(self) -> SavePlan:
        """One write item for each chunk."""
        items = []
        for name, (place, shape, values) in self._chunks.items():
            properties = TensorProperties(dtype=values.dtype)
            data = TensorWriteData(chunk=place, properties=properties, size=shape)
            index = MetadataIndex(name, place.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of one chunk."""
        return self._chunks[write_item.index.fqn][2]


class HashingWriter(FileSystemWriter):
    """Writes files, forced to disk, and knows size and SHA-256 of each when it is closed (``entries``)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, overwrite=False)
        self._hashing = _HashingFileSystem()
        self.fs = self._hashing

    def storage_meta(self) -> StorageMeta:
        """Nothing: torch would keep the path of the folder that is about to be renamed."""
        return StorageMeta()

    @property
    def entries(self) -> dict[str, FileEntry]:
        """File name -> size and checksum, of the files that this rank has written."""
        return self._hashing.entries


class PlainReader(FileSystemReader):
    """Reads checkpoint files; refuses an index that names anything but the index's own types."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the checkpoint."""
        with (Path(self.path) / INDEX_NAME).open("rb") as stream:
            metadata: Metadata = _IndexUnpickler(stream).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _HashingStream(io.RawIOBase):
    """A file open for writing from front to back that hashes what passes. It cannot seek, so the hash is exact."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._path = path
        self._digest = hashlib.sha256()
        self._size = 0
        self.problem: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = 0
        # an unbuffered file may take less than it was given
        while written < len(view):
            try:
                written += self._file.write(view[written:])
            except OSError as error:
                self.problem = OSError(error.errno, error.strerror, str(self._path))
                raise self.problem from None
        self._digest.update(view)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return self._file.fileno()

    def entry(self) -> FileEntry:
        return FileEntry(self._size, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()
        super().close()


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode
        with _HashingStream(Path(path)) as stream:
            try:
                yield stream
            except Exception:
                # torch's serialiser turns an error of the stream into one about positions in its archive
                if stream.problem is not None:
                    raise stream.problem from None
                raise
            self.entries[Path(path).name] = stream.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _INDEX_TYPES.get(module, ()):
            raise pickle.UnpicklingError(f"the index names {module}.{name}, which no checkpoint of tensors holds")
        return getattr(importlib.import_module(module), name)
