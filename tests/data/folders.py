"""Looking into prepared folders."""

import hashlib
from pathlib import Path

from conf.schema import DataConfig
from data.folder import open_folder


def content_of(folder: Path | str) -> dict[str, str]:
    """Path below ``folder`` -> sha256 of each file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def documents_of(config: DataConfig, split: str) -> list[list[int]]:
    """The documents of a split, as ids."""
    opened = open_folder(Path(config.dir), "")
    files = getattr(opened, split)
    if files is None:
        return []
    ends = [*files.documents[1:].tolist(), len(files)]
    return [
        files.window(start, end - start).tolist() for start, end in zip(files.documents.tolist(), ends, strict=True)
    ]


def texts_of(config: DataConfig, split: str) -> list[str]:
    tokenizer = open_folder(Path(config.dir), "").tokenizer
    return [tokenizer.decode(ids) for ids in documents_of(config, split)]
