"""Make the data of a run: ``python -m data.prepare [key=value ...]``, with the keys of ``train.py``.

    python -m data.prepare                                            the standard library of Python
    python -m data.prepare data=text data.path=corpus/ data.dir=outputs/data/corpus
    python -m data.prepare data=hf data.path=corpus.jsonl.gz data.tokenizer=tokenizer.json

It loads or trains a tokenizer, encodes the corpus in parallel and writes a folder (``data.folder``) that training
reads. Decided here: the same input and settings give the same bytes for any number of workers and after any
interruption; what is finished is never done again; a folder made with other settings is refused, not overwritten. A
document is held out if the hash of its text falls below ``data.val_share``, so equal documents are never on both
sides; with two or more different documents neither side is empty.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from conf.checks import ConfigError
from conf.command import leave_with, read_command_line
from conf.schema import DataConfig
from data.documents import Counts, InputFile, Unit, list_inputs, listing_hash, plan_units, read_unit
from data.encode import Part, encode_unit, is_finished, read_part, start_worker, work
from data.folder import FORMAT, RECORD, open_folder, prepare_command, read_record
from data.progress import Progress
from data.shards import PIECE_TOKENS, ShardWriter, write_json
from data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer, train_sentencepiece

# text that a tokenizer is trained on at most, in bytes: more changes few merges (12 MB take 2 s on one core)
TRAIN_TOKENIZER_BYTES = 1 << 24
PARTS = "parts-"
LOCK = ".lock"
# units handed to each worker ahead of time
UNITS_AHEAD = 4


def prepare(config: DataConfig, console: Console | None = None) -> dict[str, Any]:
    """Make ``config.dir`` complete and return its record; does nothing to a folder that is complete already.

    ConfigError: input that is missing, bad or empty, a tokenizer that does not fit, a folder made with other settings
    or by something else, or in use by another process, or that cannot be written.
    """
    if config.kind == "tokens":
        raise ConfigError("data=tokens reads folders that are prepared already. Prepare with data=stdlib, text or hf.")
    folder = Path(config.dir).absolute()
    console = console or Console(quiet=True)
    try:
        _check_owned(folder)
        settings = _settings(config)
        # a complete folder may be read-only
        record = read_record(folder) or _make(config, settings, folder, console)
        _check_complete(record, settings, config, folder)
        for parts in folder.glob(f"{PARTS}*"):
            shutil.rmtree(parts)
        return record
    except BrokenProcessPool as error:
        raise ConfigError(
            "a worker process was killed, most likely for lack of memory. Start again with a smaller data.workers; "
            "what is finished is kept."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"preparing {folder} failed: {error}. Once that is repaired, start the same command again; what is "
            "finished is kept."
        ) from error


def main(arguments: list[str]) -> None:
    """The command line."""
    config = read_command_line("python -m data.prepare", arguments).data
    console = Console(soft_wrap=True, highlight=False)
    folder = Path(config.dir).absolute()
    try:
        complete = read_record(folder) is not None
        record = prepare(config, console)
    except ConfigError as error:
        leave_with(error, 0)
    except KeyboardInterrupt:
        leave_with(ConfigError(f"interrupted. Start the same command again: what is finished in {folder} is kept."), 0)
    _show(record, f"{folder} {'was' if complete else 'is'} prepared", console)


def _settings(config: DataConfig) -> dict[str, Any]:
    """What the bytes of a folder depend on besides the content of the input."""
    given = config.tokenizer is not None
    if config.kind == "hf" and not (given and config.tokenizer.endswith(".json")):
        raise ConfigError(f"data=hf needs a tokenizer.json, not data.tokenizer={config.tokenizer}. Or use data=text.")
    return {
        "kind": config.kind,
        "path": None if config.kind == "stdlib" else str(Path(config.path or "").absolute()),
        "tokenizer": load_tokenizer(config.tokenizer).hash if given else None,
        "vocab_size": None if given else config.vocab_size,
        "text_field": config.text_field,
        "add_bos": config.add_bos,
        "add_eos": config.add_eos,
        "bad_input": config.bad_input,
        "val_share": config.val_share,
        "shard_tokens": config.shard_tokens,
    }


def _make(config: DataConfig, settings: dict[str, Any], folder: Path, console: Console) -> dict[str, Any]:
    files = list_inputs(config)
    # named for what it is made of: an interrupted start goes on here, one with other settings or input starts anew
    state = json.dumps([settings, listing_hash(files, with_times=True)], sort_keys=True)
    parts = folder / f"{PARTS}{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    parts.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        record = read_record(folder)
        if record is not None:
            # another process made it while this one waited to look
            return record
        units = plan_units(files)
        tokenizer = _build_tokenizer(config, parts, units, console)
        _encode(units, config, tokenizer, parts, console)
        return _assemble(units, config, settings, tokenizer, files, parts)


def _check_complete(record: dict[str, Any], settings: dict[str, Any], config: DataConfig, folder: Path) -> None:
    """Refuse a complete folder that was made with other settings, from other input, or is damaged."""
    _check_settings(record["settings"], settings, folder)
    try:
        files = list_inputs(config)
    except ConfigError:
        # the input may be deleted once it is prepared
        files = None
    if files is not None and listing_hash(files) != record["input"]["listing"]:
        raise ConfigError(
            f"the input of {folder} has changed: {record['input']['files']} files of {record['input']['bytes']} bytes "
            f"then, {len(files)} files of {sum(file.size for file in files)} bytes now. {_redo(folder)}"
        )
    open_folder(folder, prepare_command(config, folder))


def _check_settings(made: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    changed = [f"data.{key} was {made.get(key)}, is {now[key]}" for key in now if made.get(key) != now[key]]
    if changed:
        raise ConfigError(f"{folder} was prepared with other settings: {'; '.join(changed)}. {_redo(folder)}")


def _redo(folder: Path) -> str:
    return f"Choose another data.dir, or delete {folder} to prepare it again."


def _check_owned(folder: Path) -> None:
    """Refuse a folder that holds something else: the splits in it would be replaced."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"data.dir={folder} is a file. Set data.dir to a new folder.")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    ours = RECORD in names or any(name.startswith(PARTS) for name in names)
    if names and names != [LOCK] and not ours:
        raise ConfigError(
            f"data.dir={folder} holds {', '.join(names[:3])} and was not made by data.prepare. "
            "Set data.dir to a new folder."
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is preparing {folder}. Wait for it, or set another data.dir.") from None
        yield


def _build_tokenizer(config: DataConfig, parts: Path, units: list[Unit], console: Console) -> Tokenizer:
    """Load the given tokenizer, or train one; either way ``parts`` holds it afterwards."""
    if config.tokenizer is not None:
        load_tokenizer(config.tokenizer).save(parts)
        tokenizer = load_tokenizer(parts)
        lost = tokenizer.lost_probe()
        if lost is not None and not config.allow_lossy:
            raise ConfigError(
                f"data.tokenizer={config.tokenizer} does not give text back unchanged: {lost!r} becomes "
                f"{tokenizer.decode(tokenizer.encode(lost))!r}. Use another, or set data.allow_lossy=true."
            )
    elif (parts / "tokenizer.model").is_file():
        tokenizer = load_tokenizer(parts)
    else:
        console.print(f"training a tokenizer of {config.vocab_size} entries")
        model = train_sentencepiece(_training_texts(units, config), config.vocab_size)
        tokenizer = SentencePieceTokenizer(parts / "tokenizer.model", model)
        tokenizer.save(parts)
    for key, marker in (("add_bos", tokenizer.bos_id), ("add_eos", tokenizer.eos_id)):
        if getattr(config, key) and marker is None:
            kind = "begin" if key == "add_bos" else "end"
            raise ConfigError(f"data.{key}=true, but {config.tokenizer} has no {kind} marker. Set data.{key}=false.")
    return tokenizer


def _training_texts(units: list[Unit], config: DataConfig) -> Iterator[str]:
    """Text to train a tokenizer on: all of it, or the beginning of units that are spread evenly over the corpus."""
    total = sum(unit.size for unit in units)
    chosen = units
    if total > TRAIN_TOKENIZER_BYTES:
        count = max(1, min(len(units), TRAIN_TOKENIZER_BYTES * len(units) // total))
        chosen = [units[number * len(units) // count] for number in range(count)]
    left = TRAIN_TOKENIZER_BYTES
    for number, unit in enumerate(chosen):
        share = left // (len(chosen) - number)
        for text in read_unit(unit, config, Counts()):
            part = text[:share]
            yield part
            size = len(part.encode())
            share, left = share - size, left - size
            if share <= 0:
                break


def _encode(units: list[Unit], config: DataConfig, tokenizer: Tokenizer, parts: Path, console: Console) -> None:
    """Make the parts that are not there yet, in parallel."""
    todo = [unit for unit in units if not is_finished(parts, unit.index)]
    workers = min(config.workers or len(os.sched_getaffinity(0)), len(todo))
    with Progress(console, "encoding", sum(unit.size for unit in units)) as progress:
        progress.advance(sum(unit.size for unit in units) - sum(unit.size for unit in todo), 0)
        if workers <= 1:
            for unit in todo:
                progress.advance(unit.size, encode_unit(unit, config, tokenizer, parts))
            return
        # a fresh interpreter: forking a process that has threads (the progress bar) can hang
        context = get_context("spawn")
        stop = context.Event()
        with ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(config, parts, stop)) as pool:
            running: dict[Future[int], Unit] = {}
            try:
                for unit in todo:
                    running[pool.submit(work, unit)] = unit
                    if len(running) >= workers * UNITS_AHEAD:
                        _take_finished(running, progress)
                while running:
                    _take_finished(running, progress)
            except BaseException:
                # the workers give up what they are at, and nothing writes into the folder once this is left
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def _take_finished(running: dict[Future[int], Unit], progress: Progress) -> None:
    """Wait until a unit is finished and report it; raises the error of one that failed."""
    finished, _ = wait(running, return_when=FIRST_COMPLETED)
    # of several faults, show the first in the input
    for future in sorted(finished, key=lambda future: running[future].index):
        progress.advance(running.pop(future).size, future.result())


def _assemble(
    units: list[Unit],
    config: DataConfig,
    settings: dict[str, Any],
    tokenizer: Tokenizer,
    files: list[InputFile],
    parts: Path,
) -> dict[str, Any]:
    """Put the parts together into splits beside them and write the record."""
    folder = parts.parent
    counts, bound = _choose_held_out(units, config, tokenizer, parts)
    tokenizer.save(folder)
    splits = {}
    for name, held_out in (("train", False), ("val", True)):
        if held_out and bound == 0:
            continue
        writer = ShardWriter(folder / name, tokenizer.vocab_size, tokenizer.hash, config.shard_tokens)
        for unit in units:
            part = read_part(parts, unit.index, tokenizer.vocab_size)
            for tokens, lengths in _documents_of(part, held_out, bound):
                writer.append(tokens, lengths)
        sidecar = writer.close(dict(sorted(counts.totals.items())))
        splits[name] = {key: sidecar[key] for key in ("checksum", "tokens", "documents")}
    record = {
        "format": FORMAT,
        "settings": settings,
        "input": {
            "files": len(files),
            "bytes": sum(file.size for file in files),
            "listing": listing_hash(files),
        },
        "tokenizer": {
            "file": tokenizer.path.name,
            "hash": tokenizer.hash,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        },
        "counts": dict(sorted(counts.totals.items())),
        "splits": splits,
    }
    write_json(folder / RECORD, record)
    return record


def _choose_held_out(units: list[Unit], config: DataConfig, tokenizer: Tokenizer, parts: Path) -> tuple[Counts, int]:
    """All counts, and the bound below which a document's hash holds it out (0: nothing is)."""
    counts = Counts()
    bound = int(config.val_share * 2.0**64)
    low, high, held_out = 1 << 64, -1, 0
    for unit in units:
        part = read_part(parts, unit.index, tokenizer.vocab_size)
        counts.add(part.counts)
        if part.hashes.size:
            low, high = min(low, int(part.hashes.min())), max(high, int(part.hashes.max()))
            held_out += int(np.count_nonzero(_is_below(part.hashes, bound)))
    documents = counts.totals["documents"]
    if documents == 0:
        raise ConfigError(_nothing_found(config, counts))
    if bound == 0 or low == high:
        # nothing asked for, or all documents are equal and would have to be on both sides
        return counts, 0
    if held_out == 0:
        return counts, low + 1
    return counts, min(bound, high)


def _is_below(hashes: np.ndarray, bound: int) -> np.ndarray:
    return hashes < np.uint64(bound)


def _nothing_found(config: DataConfig, counts: Counts) -> str:
    totals = counts.totals
    found = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in sorted(totals.items()) if number)
    text = f"data.path={config.path} holds no text ({found or 'no records'})."
    if totals["missing_field"] and counts.fields:
        return f"{text} data.text_field={config.text_field} is absent; a record has {', '.join(sorted(counts.fields))}."
    return f"{text} Give files with text in them."


def _documents_of(part: Part, held_out: bool, bound: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and lengths of the documents of a part that belong to one side, a bounded number of tokens at a time."""
    mine = _is_below(part.hashes, bound) == held_out
    ends = np.cumsum(part.lengths)
    first = 0
    while first < len(ends):
        begin = int(ends[first] - part.lengths[first])
        # at least one document, however long
        last = max(first + 1, int(np.searchsorted(ends, begin + PIECE_TOKENS, side="right")))
        chosen, lengths = mine[first:last], part.lengths[first:last]
        if chosen.any():
            tokens = part.tokens[begin : int(ends[last - 1])]
            yield (tokens if chosen.all() else tokens[np.repeat(chosen, lengths)]), lengths[chosen]
        first = last


def _show(record: dict[str, Any], title: str, console: Console) -> None:
    console.print(f"{title}: {record['tokenizer']['vocab_size']} tokenizer entries")
    for name, split in record["splits"].items():
        console.print(f"  {name}: {split['tokens']:,} tokens, {split['documents']:,} documents")
    if "val" not in record["splits"]:
        console.print("  nothing is held out: data.val_share is 0, or the corpus is one document")
    left_out = {name: number for name, number in record["counts"].items() if name != "documents" and number}
    if left_out:
        console.print("  bad input: " + ", ".join(f"{name} {number:,}" for name, number in left_out.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
