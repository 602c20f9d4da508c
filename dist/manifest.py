"""What a checkpoint says about itself, and when it counts as undamaged.

Decided here: the fields of ``manifest.json`` and the format version. A checkpoint is undamaged when every file has
the size and the SHA-256 that the manifest states, and the manifest its own. Nothing here is collective.
"""

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# raised when a reader of the previous version could misread the folder; older versions that are still read are listed
FORMAT_VERSION = 1
READABLE_VERSIONS = (1,)
MANIFEST_NAME = "manifest.json"
HASH_CHUNK_BYTES = 8 * 1024 * 1024


class DamagedError(ValueError):
    """A checkpoint folder that cannot be used. The message says what is wrong with it."""


@dataclass
class FileEntry:
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digest of the content."""


@dataclass
class TensorEntry:
    """One tensor of a checkpoint."""

    dtype: str
    """As torch prints it, without the module: ``float32``, ``uint8``."""
    shape: list[int]
    """Global shape, whatever the sharding was."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


@dataclass
class Manifest:
    """Everything about a checkpoint except the tensors' values."""

    step: int
    world_size: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    meta: dict[str, Any]
    """Plain values given by the trainer: data position, configuration, identities."""
    versions: dict[str, str]
    format_version: int = FORMAT_VERSION


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write ``manifest`` into the folder ``path``, durable together with the folder's other entries."""
    fields = asdict(manifest)
    with (path / MANIFEST_NAME).open("w") as stream:
        json.dump({**fields, "sha256": manifest_digest(fields)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(path)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint folder ``path``.

    Raises:
        DamagedError: there is none, it is not valid, or its format version is not one that this program reads.
    """
    if not path.is_dir():
        raise DamagedError("the folder does not exist")
    try:
        fields = json.loads((path / MANIFEST_NAME).read_text())
        version = fields["format_version"]
        if version not in READABLE_VERSIONS:
            readable = ", ".join(map(str, READABLE_VERSIONS))
            raise DamagedError(f"format version {version} is not one that this program reads ({readable})")
        stated = fields.pop("sha256", None)
        # the first checkpoints of this format state none
        if stated is not None and stated != manifest_digest(fields):
            raise DamagedError(f"{MANIFEST_NAME} has another checksum than it states")
        return Manifest(
            step=fields["step"],
            world_size=fields["world_size"],
            files={name: FileEntry(**entry) for name, entry in fields["files"].items()},
            tensors={name: TensorEntry(**entry) for name, entry in fields["tensors"].items()},
            meta=fields["meta"],
            versions=fields["versions"],
            format_version=version,
        )
    except FileNotFoundError:
        raise DamagedError(f"it has no {MANIFEST_NAME}: it was never finished") from None
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST_NAME} cannot be read ({type(error).__name__}: {error})") from error


def manifest_digest(fields: dict[str, Any]) -> str:
    """Checksum of the content of a manifest, ``fields`` being all but the checksum itself."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def file_problem(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with the file ``path``, which should be as ``entry`` says; None if nothing is."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{path.name} has {size} bytes instead of {entry.size}"
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as stream:
            while chunk := stream.read(HASH_CHUNK_BYTES):
                digest.update(chunk)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if digest.hexdigest() == entry.sha256 else f"{path.name} has the right size but another checksum"


def sync_folder(path: Path) -> None:
    """Make the names in the folder ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_problem(value: Any, where: str = "meta") -> str | None:
    """Why ``value`` would not come back from JSON as it is, naming the place; None if it would."""
    if value is None or isinstance(value, bool | int | float | str):
        return None
    if isinstance(value, list):
        problems = (plain_problem(item, f"{where}[{index}]") for index, item in enumerate(value))
        return next((problem for problem in problems if problem), None)
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{where} has the key {key!r}, which is not a string"
            if problem := plain_problem(item, f"{where}.{key}"):
                return problem
        return None
    return f"{where} is a {type(value).__name__}, not a plain value (dict, list, str, number, bool, None)"
