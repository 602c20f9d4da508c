"""A prepared folder: tokenizer, splits, and the record that says what it was made of and that it is whole.

::

    prepared.json                       written last: settings, tokenizer, counts, checksums
    tokenizer.model | tokenizer.json    (with tokenizer_config.json, which names the markers)
    train/  val/                        splits of ``data.shards``; val is absent where nothing is held out

``data.prepare`` writes it and ``data.loader`` reads it; a folder without the record is not prepared, whatever else
it holds.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.checks import ConfigError
from conf.schema import DataConfig
from data.shards import ShardError, TokenFiles
from data.tokenizer import Tokenizer, load_tokenizer

RECORD = "prepared.json"
FORMAT = 1


@dataclass
class PreparedFolder:
    """An open prepared folder; ``val`` is None where nothing is held out."""

    path: Path
    record: dict[str, Any]
    tokenizer: Tokenizer
    train: TokenFiles
    val: TokenFiles | None


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a prepared folder, or None where there is none. ConfigError: damaged, or another format."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Delete {folder} and prepare it again.") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"{path} is of another format than {FORMAT}. Delete {folder} and prepare it again.")
    return record


def open_folder(path: Path, command: str) -> PreparedFolder:
    """Open and check a prepared folder; ``command`` is what prepares it, for the message. ConfigError, ShardError."""
    if not path.is_dir():
        raise ConfigError(f"the data folder {path} does not exist. Run: {command}")
    record = read_record(path)
    if record is None:
        raise ConfigError(f"the data folder {path} is not prepared, or not to the end. Run: {command}")
    tokenizer = load_tokenizer(path)
    train = _open_split(path / "train", tokenizer, record["splits"]["train"])
    has_val = "val" in record["splits"]
    val = _open_split(path / "val", tokenizer, record["splits"]["val"]) if has_val else None
    return PreparedFolder(path, record, tokenizer, train, val)


def prepare_command(config: DataConfig, folder: Path) -> str:
    """The command that prepares ``folder`` for this configuration."""
    if config.kind == "tokens":
        return f"python -m data.prepare data=text data.path=<text files> data.dir={folder}"
    parts = [f"python -m data.prepare data={config.kind}"]
    default = DataConfig()
    for key in ("path", "tokenizer", "vocab_size", "text_field", "add_bos", "add_eos", "bad_input", "val_share"):
        value = getattr(config, key)
        if value != getattr(default, key):
            parts.append(f"data.{key}={str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))}")
    return " ".join([*parts, f"data.dir={shlex.quote(str(folder))}"])


def _open_split(folder: Path, tokenizer: Tokenizer, entry: dict[str, Any]) -> TokenFiles:
    files = TokenFiles.open(folder)
    if files.sidecar["checksum"] != entry["checksum"]:
        raise ShardError(f"{folder} is not the split that {folder.parent / RECORD} describes. Prepare the data again.")
    if files.sidecar["tokenizer_hash"] != tokenizer.hash or files.sidecar["vocab_size"] != tokenizer.vocab_size:
        raise ShardError(
            f"{folder} was written with another tokenizer (hash {files.sidecar['tokenizer_hash'][:12]}, "
            f"{files.sidecar['vocab_size']} ids) than {tokenizer.path} (hash {tokenizer.hash[:12]}, "
            f"{tokenizer.vocab_size} ids). Prepare the data again."
        )
    return files
