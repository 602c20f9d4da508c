"""Input files to documents: which files count, how they are cut into units of work, and what bad input does.

Decided here: a .txt, .md or .py file is one document; a .jsonl(.gz) line or a Parquet row is one. Text is UTF-8 and
kept as it is (line ends and NUL included; a byte order mark at the start of a file is an encoding signature and
dropped). The units depend on the input alone, so that the output does not depend on the number of workers. ``Counts``
says what was left out and why; ``data.bad_input`` decides whether it may be. A document must fit in memory.
"""

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.checks import ConfigError
from conf.schema import DataConfig

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".parquet")
# the standard library: its tests and what is installed beside it are not part of the corpus
STDLIB_SUFFIXES = (".py", ".txt")
STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
STDLIB_MIN_BYTES = 1 << 20
# input bytes of a unit of work: about 64 units, within these limits
UNITS = 64
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 1 << 18, 1 << 26
BOM = b"\xef\xbb\xbf"


class BadInput(ConfigError):
    """Input that ``data.bad_input=error`` does not accept; the message names file and line."""


@dataclass(frozen=True)
class InputFile:
    """One file of the corpus; ``name`` is its path below the corpus folder, ``size`` in bytes."""

    path: str
    name: str
    size: int
    modified: int


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes (.jsonl) or row groups (.parquet) from ``start`` to ``stop``; ``stop`` None: all of it."""

    path: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Unit:
    """What one worker reads in one go; ``size`` in input bytes, for the progress bar."""

    index: int
    pieces: tuple[Piece, ...]
    size: int


@dataclass
class Counts:
    """What became of the input.

    ``totals``: documents (kept), empty (blank), missing_field (absent or null), replaced (kept with U+FFFD for bad
    bytes), skipped_bytes (left out for bad bytes), broken (no JSON object with a text), cut_files (read up to there).
    """

    totals: Counter = field(default_factory=Counter)
    fields: set[str] = field(default_factory=set)
    """Fields of a record that lacks the text field, for the message if all of them do."""

    def add(self, other: "Counts") -> None:
        """Add the counts of another part of the input."""
        self.totals.update(other.totals)
        self.fields |= other.fields


def list_inputs(config: DataConfig) -> list[InputFile]:
    """The files of the corpus, sorted by name. ConfigError: path missing, or nothing readable in it."""
    if config.kind == "stdlib":
        return _list_stdlib()
    if config.path is None:
        raise ConfigError(f"data={config.kind} needs data.path, the file or folder to read. Set data.path=<path>.")
    root = Path(config.path).absolute()
    if root.is_file():
        if not root.name.lower().endswith(SUFFIXES):
            raise ConfigError(f"data.path={root} is none of {', '.join(SUFFIXES)}. Convert it, or give another file.")
        return [_input_file(root, root.name)]
    if not root.is_dir():
        raise ConfigError(f"data.path={root} does not exist. Give a file or folder of {', '.join(SUFFIXES)}.")
    found = _walk(root, SUFFIXES, set(), Path(config.dir).absolute())
    if not found:
        raise ConfigError(f"data.path={root} holds no file that ends in one of {', '.join(SUFFIXES)}.")
    return found


def listing_hash(files: list[InputFile], with_times: bool = False) -> str:
    """sha256 hex over names and sizes, and modification times if asked: has the input changed?"""
    lines = (f"{file.name}\0{file.size}\0{file.modified if with_times else ''}\n" for file in files)
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def plan_units(files: list[InputFile]) -> list[Unit]:
    """Cut the corpus into units of about equal size, in the order of ``files``; depends on ``files`` alone."""
    target = min(max(sum(file.size for file in files) // UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    units: list[Unit] = []
    pieces: list[Piece] = []
    size = 0
    for file in files:
        for piece, piece_size in _cut_file(file, target):
            pieces.append(piece)
            size += piece_size
            if size >= target:
                units.append(Unit(len(units), tuple(pieces), size))
                pieces, size = [], 0
    if pieces:
        units.append(Unit(len(units), tuple(pieces), size))
    return units


def read_unit(unit: Unit, config: DataConfig, counts: Counts) -> Iterator[str]:
    """The documents of a unit, none of them blank; ``counts`` is kept up to date.

    BadInput: bytes that are not UTF-8, a broken record or a cut file, under ``data.bad_input=error``. ConfigError: a
    Parquet file without the text field.
    """
    reader = _Reader(config, counts)
    for piece in unit.pieces:
        for text in reader.read(piece):
            if text.strip():
                counts.totals["documents"] += 1
                yield text
            else:
                counts.totals["empty"] += 1


class _Reader:
    """Reads pieces under one policy for bad input."""

    def __init__(self, config: DataConfig, counts: Counts) -> None:
        self._policy = config.bad_input
        self._field = config.text_field
        self._counts = counts.totals
        self._fields = counts.fields

    def read(self, piece: Piece) -> Iterator[str]:
        name = piece.path.lower()
        if name.endswith(".parquet"):
            return self._read_parquet(piece)
        if name.endswith((".jsonl", ".jsonl.gz")):
            return self._read_jsonl(piece)
        return self._read_text(piece)

    def _read_text(self, piece: Piece) -> Iterator[str]:
        content = Path(piece.path).read_bytes().removeprefix(BOM)
        text = self._decode(content, lambda at: f"{piece.path}, line {_line_number(content, at)}")
        if text is not None:
            yield text

    def _read_jsonl(self, piece: Piece) -> Iterator[str]:
        compressed = piece.path.lower().endswith(".gz")
        with gzip.open(piece.path, "rb") if compressed else open(piece.path, "rb") as file:
            if piece.start:
                # a line belongs to the piece in which it starts
                file.seek(piece.start - 1)
                file.readline()
            position, number = file.tell(), 0
            while piece.stop is None or position < piece.stop:
                try:
                    line = file.readline()
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    problem = f"{piece.path}, after line {number}: the file is cut or damaged ({error})"
                    self._bad("cut_files", problem)
                    return
                if not line:
                    return
                number += 1
                where = _Line(piece.path, 0 if compressed else piece.start, number)
                yield from self._record(line.removeprefix(BOM) if position == 0 else line, where)
                position += len(line)

    def _record(self, line: bytes, where: "_Line") -> Iterator[str]:
        if not line.strip():
            return
        content = self._decode(line, lambda at: f"{where}, byte {at}")
        if content is None:
            return
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            self._bad("broken", where, f": not one JSON object ({error})")
            return
        if not isinstance(record, dict):
            self._bad("broken", where, f": {type(record).__name__} instead of a JSON object")
            return
        yield from self._field_of(record, where, may_hold_surrogates=b"\\ud" in line.lower())

    def _field_of(self, record: dict[str, Any], where: "_Line", may_hold_surrogates: bool) -> Iterator[str]:
        text = record.get(self._field)
        if text is None:
            self._counts["missing_field"] += 1
            if self._field not in record and not self._fields:
                self._fields.update(sorted(record)[:20])
        elif not isinstance(text, str):
            self._bad("broken", where, f": field {self._field!r} is {type(text).__name__}, not text")
        elif may_hold_surrogates and any("\ud800" <= char <= "\udfff" for char in text):
            # half of a surrogate pair is no character, and UTF-8 cannot hold it
            text = self._repaired(text, where, f": half a surrogate pair in field {self._field!r}")
            if text is not None:
                yield text
        else:
            yield text

    def _read_parquet(self, piece: Piece) -> Iterator[str]:
        # imported here: most corpora have no Parquet file, and it takes a quarter of a second
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(piece.path)
            self._check_column(piece.path, file.schema_arrow)
            stop = file.num_row_groups if piece.stop is None else piece.stop
            for group in range(piece.start, stop):
                column = file.read_row_group(group, columns=[self._field], use_threads=False).column(0)
                yield from self._column(column.cast(pyarrow.large_binary()), f"{piece.path}, row group {group}")
        except (FileNotFoundError, PermissionError):
            raise
        except (pyarrow.ArrowException, OSError) as error:
            # Arrow raises OSError for a damaged page
            self._bad("cut_files", f"{piece.path}: the file is cut or damaged ({error})")

    def _column(self, column: Any, where: str) -> Iterator[str]:
        for chunk in column.chunks:
            for row, value in enumerate(chunk):
                content = value.as_py()
                if content is None:
                    self._counts["missing_field"] += 1
                    continue
                text = self._decode(content, lambda at, row=row: f"{where}, row {row}, byte {at}")
                if text is not None:
                    yield text

    def _check_column(self, path: str, schema: Any) -> None:
        import pyarrow

        if self._field not in schema.names:
            raise ConfigError(
                f"data.text_field={self._field} is not a column of {path}; it has {', '.join(schema.names)}. "
                "Set it to one of these."
            )
        kind = schema.field(self._field).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ConfigError(f"data.text_field={self._field} of {path} holds {kind}, not text. Set another column.")

    def _decode(self, content: bytes, where: Callable[[int], str]) -> str | None:
        """UTF-8 to text, or None where the policy drops it; ``where(byte offset)`` names the place."""
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            place = _Lazy(where, error.start)
            problem = f": byte 0x{content[error.start]:02X} is not UTF-8"
            return self._repaired(content.decode("utf-8", "replace"), place, problem)

    def _repaired(self, text: str, where: object, problem: str) -> str | None:
        if self._policy == "replace":
            self._counts["replaced"] += 1
            return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)
        self._bad("skipped_bytes", where, problem)
        return None

    def _bad(self, kind: str, where: object, problem: str = "") -> None:
        """Count a fault or stop at it; ``where`` is turned into text only if it is shown."""
        if self._policy == "error":
            raise BadInput(f"{where}{problem}. Repair the file, or set data.bad_input=replace or data.bad_input=skip.")
        self._counts[kind] += 1


@dataclass(frozen=True)
class _Lazy:
    """A place that costs something to name."""

    name: Callable[[int], str]
    offset: int

    def __str__(self) -> str:
        return self.name(self.offset)


@dataclass(frozen=True)
class _Line:
    """Place of a line: lines before byte ``start`` are only counted when the place is shown."""

    path: str
    start: int
    number: int

    def __str__(self) -> str:
        before = 0
        if self.start:
            with open(self.path, "rb") as file:
                before = file.read(self.start - 1).count(b"\n")
                # the line that crosses the start was read by the piece before
                before += 1
        return f"{self.path}, line {before + self.number}"


def _line_number(content: bytes, offset: int) -> int:
    return content.count(b"\n", 0, offset) + 1


def _cut_file(file: InputFile, target: int) -> list[tuple[Piece, int]]:
    """Pieces of a file with their size in bytes."""
    name = file.name.lower()
    if name.endswith(".jsonl") and file.size > target:
        bounds = [*range(0, file.size, target), file.size]
        return [(Piece(file.path, low, high), high - low) for low, high in zip(bounds, bounds[1:], strict=False)]
    if name.endswith(".parquet") and file.size > target:
        import pyarrow
        import pyarrow.parquet

        try:
            groups = pyarrow.parquet.ParquetFile(file.path).num_row_groups
        except (pyarrow.ArrowException, OSError):
            # the worker that reads it applies the policy for cut files
            return [(Piece(file.path), file.size)]
        return [(Piece(file.path, group, group + 1), file.size // groups) for group in range(groups)]
    return [(Piece(file.path), file.size)]


def _list_stdlib() -> list[InputFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(root, STDLIB_SUFFIXES, STDLIB_EXCLUDED, None)
    size = sum(file.size for file in files)
    if size < STDLIB_MIN_BYTES:
        raise ConfigError(
            f"data=stdlib found {size} bytes of source in {root}: this Python comes without it. "
            "Set data=text data.path=<files>."
        )
    return files


def _walk(root: Path, suffixes: tuple[str, ...], excluded: set[str], own: Path | None) -> list[InputFile]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in excluded and name[0] != "." and Path(folder, name) != own]
        for name in names:
            path = Path(folder, name)
            if name[0] != "." and name.lower().endswith(suffixes) and path.is_file():
                found.append(_input_file(path, path.relative_to(root).as_posix()))
    return sorted(found, key=lambda file: file.name)


def _input_file(path: Path, name: str) -> InputFile:
    status = path.stat()
    return InputFile(str(path), name, status.st_size, status.st_mtime_ns)
