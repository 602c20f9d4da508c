"""Tokenizers: text to ids and back, without a loss and without surprises.

Decided here: what a tokenizer is for the rest of the program (``Tokenizer``), how a SentencePiece model is trained,
and the two guarantees that training data rests on. Text survives ``decode(encode(text))`` unchanged (``lossless``
says whether a foreign tokenizer keeps that), and a marker (begin, end, unknown, padding) is never produced from
text: a document that contains the characters ``</s>`` gets the ids of these four characters. Markers are placed by
``data.prepare`` alone. Which documents are encoded, and where the ids go, is decided there too.
"""

import hashlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece
import tokenizers

from conf.checks import ConfigError

# SentencePiece writes a space as this character, so text that holds the character itself is encoded by bytes
SPACE_SYMBOL = "\u2581"
# documents longer than this are encoded in pieces that end at a line: BPE keeps a queue over the whole text it is given
MAX_ENCODE_CHARS = 1 << 20
# longest piece of text handed to the SentencePiece trainer, in UTF-8 bytes; its own default drops lines above 4192
TRAIN_CHUNK_BYTES = 4096
MARKER_NAMES = {
    "bos": ("<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "[BOS]"),
    "eos": ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]"),
}
# what a tokenizer must give back unchanged to count as lossless
PROBES = (
    "Plain words, and some more of them.",
    " leading,  double  and trailing spaces  ",
    "def f(x):\n\tif x:\r\n        return 1\n\n\n",
    "\n",
    "Caf\u00e9 na\u00efve \ufb01 \u00bd \u212b e\u0301 \u6f22\u5b57 \U0001f642",
    "U\u0308PPER lower 0123456789 \u2581 \u2585 \ufeff \ufffd \u00a0 \u200b \x00 \x7f",
    "<s> </s> <unk> <pad> <0x41> <|endoftext|> [CLS] [MASK]",
)


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes: ``path`` (the file), ``hash`` (sha256 hex of what decides ids), ``vocab_size`` (largest id + 1),
    ``bos_id`` and ``eos_id`` (ids of the begin and end marker, ``None`` where there is none).
    """

    path: Path
    hash: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, on one thread. No marker is added, and none is produced from text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; markers give none. Bytes that are not UTF-8 become U+FFFD. ValueError: id out of range."""

    @abstractmethod
    def save(self, folder: Path) -> Path:
        """Write the tokenizer into ``folder`` so that ``load_tokenizer`` finds it there; returns the file."""

    def encode(self, text: str) -> list[int]:
        """Ids of one text, see ``encode_batch``."""
        return self.encode_batch([text])[0]

    def lost_probe(self) -> str | None:
        """The first probe text that does not survive ``decode(encode(text))``, or None: the tokenizer is lossless."""
        return next((text for text in PROBES if self.decode(self.encode(text)) != text), None)

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        ids = [int(token) for token in ids]
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.path} (0 to {self.vocab_size - 1}).")
        return ids


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file."""

    def __init__(self, path: Path, model: bytes | None = None) -> None:
        self.path = path
        self.model = path.read_bytes() if model is None else model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        except RuntimeError as error:
            raise ConfigError(f"data.tokenizer={path} is not a SentencePiece model. Give the .model file.") from error
        self.hash = hashlib.sha256(self.model).hexdigest()
        self.vocab_size = self._processor.vocab_size()
        self.bos_id = _present(self._processor.bos_id())
        self.eos_id = _present(self._processor.eos_id())
        self._symbol_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_SYMBOL.encode()]
        self._has_bytes = all(self._processor.is_byte(token) for token in self._symbol_ids)
        processor = self._processor
        self._silent = {token for token in range(self.vocab_size) if processor.is_control(token)}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        if all(len(text) <= MAX_ENCODE_CHARS and not self._is_special(text) for text in texts):
            return self._processor.encode(list(texts), out_type=int, num_threads=1)
        return [self._encode_any(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return self._processor.decode([token for token in self._check_ids(ids) if token not in self._silent])

    def save(self, folder: Path) -> Path:
        """See ``Tokenizer``."""
        return _write(folder / "tokenizer.model", self.model)

    def _is_special(self, text: str) -> bool:
        return self._has_bytes and SPACE_SYMBOL in text

    def _encode_any(self, text: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(text.split(SPACE_SYMBOL) if self._has_bytes else [text]):
            ids += self._symbol_ids if index else []
            for piece in _lines_up_to(part, MAX_ENCODE_CHARS):
                ids += self._processor.encode(piece, out_type=int)
        return ids


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``; markers come from the files beside it, else from their usual names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._json = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(self._json.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception for a file it cannot read
            raise ConfigError(f"data.tokenizer={path} is not a tokenizer.json: {error}. Give such a file.") from error
        # truncation would drop the end of a document, padding would add ids that are no text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # text that spells a special token is text
        self._tokenizer.encode_special_tokens = True
        self._vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values()) + 1
        self._markers = {kind: self._find_marker(kind) for kind in MARKER_NAMES}
        self.bos_id, self.eos_id = (self._vocab.get(self._markers[kind]) for kind in ("bos", "eos"))
        self.hash = hashlib.sha256(self._json + json.dumps(self._markers, sort_keys=True).encode()).hexdigest()
        added = self._tokenizer.get_added_tokens_decoder()
        self._silent = {token for token, entry in added.items() if entry.special} | {self.bos_id, self.eos_id}
        if self._spells_marker():
            raise ConfigError(
                f'data.tokenizer={path} turns the text of a marker into the marker itself. Set "special": true for '
                f"{', '.join(repr(name) for name in self._markers.values() if name)} in its added_tokens."
            )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        if len(texts) == 1 or any(len(text) > MAX_ENCODE_CHARS for text in texts):
            return [self._encode_any(text) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        kept = [token for token in self._check_ids(ids) if token not in self._silent]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def save(self, folder: Path) -> Path:
        """See ``Tokenizer``."""
        markers = {f"{kind}_token": name for kind, name in self._markers.items()}
        _write(folder / "tokenizer_config.json", json.dumps(markers, indent=2, sort_keys=True).encode() + b"\n")
        return _write(folder / "tokenizer.json", self._json)

    def _encode_any(self, text: str) -> list[int]:
        pieces = _lines_up_to(text, MAX_ENCODE_CHARS)
        return [token for piece in pieces for token in self._tokenizer.encode(piece, add_special_tokens=False).ids]

    def _find_marker(self, kind: str) -> str | None:
        """Name of the begin or end marker: from the files that Hugging Face puts beside it, else a usual name."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            beside = self.path.with_name(name)
            if not beside.is_file():
                continue
            settings = json.loads(beside.read_text("utf-8"))
            if f"{kind}_token" not in settings:
                continue
            marker = settings[f"{kind}_token"]
            marker = marker["content"] if isinstance(marker, dict) else marker
            if marker is not None and marker not in self._vocab:
                raise ConfigError(f"{beside} names the {kind} marker {marker!r}, which {self.path.name} does not have.")
            return marker
        return next((name for name in MARKER_NAMES[kind] if name in self._vocab), None)

    def _spells_marker(self) -> bool:
        names = [name for name in self._markers.values() if name]
        return any(self._silent.intersection(self.encode(f"a{name}b")) for name in names)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a SentencePiece ``.model``, a Hugging Face ``tokenizer.json``, or the one of these in a folder.

    ConfigError: no such file, another kind of file, or a damaged one.
    """
    path = Path(path).absolute()
    if path.is_dir():
        found = [path / name for name in ("tokenizer.model", "tokenizer.json") if (path / name).is_file()]
        if not found:
            raise ConfigError(
                f"{path} holds neither tokenizer.model nor tokenizer.json. Give the tokenizer file itself."
            )
        path = found[0]
    if not path.is_file():
        raise ConfigError(
            f"data.tokenizer={path} does not exist. Give a .model or tokenizer.json file, or null to train."
        )
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path)
    raise ConfigError(f"data.tokenizer={path} must end in .model (SentencePiece) or .json (Hugging Face).")


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    *,
    unk_id: int = 0,
    bos_id: int | None = 1,
    eos_id: int | None = 2,
    symbols: Sequence[str] = (),
) -> bytes:
    """Train a BPE model that loses nothing: byte fallback, no normalisation, spaces and newlines kept.

    Args: ``texts`` any strings (long ones are cut, nothing is dropped); ``vocab_size`` exact size, markers and the 256
    byte pieces included; ``bos_id``/``eos_id`` None for no such marker; ``symbols`` further markers, one id each.
    Returns the bytes of a ``.model`` file; equal input gives equal bytes. ConfigError: ids that clash or lie outside
    the vocabulary, symbols that cannot be one id, no text, or a vocabulary that the text cannot fill (with the
    range it can).
    """
    _check_marker_ids(vocab_size, {"unk": unk_id, "bos": bos_id, "eos": eos_id})
    _check_symbols(symbols)
    output = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_chunks(texts),
            model_writer=output,
            model_type="bpe",
            vocab_size=vocab_size,
            unk_id=unk_id,
            bos_id=-1 if bos_id is None else bos_id,
            eos_id=-1 if eos_id is None else eos_id,
            pad_id=-1,
            control_symbols=list(symbols),
            byte_fallback=True,
            # rarer characters are spelt in bytes
            character_coverage=0.9999,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=2 * TRAIN_CHUNK_BYTES,
            # two threads save 15 % of 2 s, and the model file would record their number
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _training_error(error, vocab_size, symbols) from error
    model = output.getvalue()
    _check_trained(model, vocab_size, {"unk": unk_id, "bos": bos_id, "eos": eos_id}, symbols)
    return model


def _check_marker_ids(vocab_size: int, ids: dict[str, int | None]) -> None:
    used: dict[int, str] = {}
    for name, token in ids.items():
        if token is None:
            continue
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{name}_id={token} lies outside the vocabulary (0 to {vocab_size - 1}). Set an id in it, or None for "
                "no marker."
            )
        if token in used:
            raise ConfigError(f"{name}_id={token} is also {used[token]}_id. Give each marker an id of its own.")
        used[token] = name
    if ids["unk"] is None:
        raise ConfigError("unk_id=None: SentencePiece needs an unknown id. Set unk_id=0.")


def _check_symbols(symbols: Sequence[str]) -> None:
    taken = {"<s>", "</s>", "<unk>", "<pad>"}
    for symbol in symbols:
        if not symbol or re.search(r"[\s\"',]", symbol) or SPACE_SYMBOL in symbol:
            raise ConfigError(
                f"the symbol {symbol!r} is empty or holds a space, quote or comma. Use a name like <sep>."
            )
        if symbol in taken or re.fullmatch(r"<0x[0-9A-F]{2}>", symbol):
            raise ConfigError(f"the symbol {symbol!r} is taken already. Use another name, each one once.")
        taken.add(symbol)


def _check_trained(model: bytes, vocab_size: int, ids: dict[str, int | None], symbols: Sequence[str]) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    found = {name: _present(getattr(processor, f"{name}_id")()) for name in ids}
    if found != ids or processor.vocab_size() != vocab_size:
        raise ConfigError(
            f"SentencePiece made {found} and {processor.vocab_size()} ids; {ids} and {vocab_size} were asked."
        )
    for symbol in symbols:
        token = processor.piece_to_id(symbol)
        if processor.id_to_piece(token) != symbol or not processor.is_control(token):
            raise ConfigError(f"the symbol {symbol!r} did not become one marker id. Use a plain name like <sep>.")


def _training_error(error: RuntimeError, vocab_size: int, symbols: Sequence[str]) -> ConfigError:
    """The trainer's failure as value, rule and fix."""
    text = str(error)
    too_high = re.search(r"Vocabulary size too high \(\d+\).*value <= (\d+)", text)
    too_low = re.search(r"smaller than required_chars\. \d+ vs (\d+)", text)
    if too_high:
        return ConfigError(
            f"data.vocab_size={vocab_size} is more than this text can fill: at most {too_high[1]}. Set data.vocab_size "
            f"to {too_high[1]} or less, or give more text."
        )
    if too_low:
        return ConfigError(
            f"data.vocab_size={vocab_size} does not hold the markers, the 256 byte pieces and the characters of this "
            f"text: at least {too_low[1]}. Set data.vocab_size to {too_low[1]} or more."
        )
    if "sentences_.empty()" in text:
        return ConfigError("there is no text to train a tokenizer on: every document is empty. Check data.path.")
    return ConfigError(f"SentencePiece could not train {vocab_size} ids: {text.strip()}")


def _training_chunks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        # a character takes at most 4 bytes
        yield from _lines_up_to(text, TRAIN_CHUNK_BYTES // 4)


def _lines_up_to(text: str, limit: int) -> Iterator[str]:
    """Cut ``text`` into pieces of at most ``limit`` characters, after a newline or before a space where possible."""
    start = 0
    while len(text) - start > limit:
        stop = text.rfind("\n", start, start + limit) + 1
        if stop <= start:
            stop = text.rfind(" ", start + 1, start + limit)
        if stop <= start:
            stop = start + limit
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _present(token: int) -> int | None:
    return token if token >= 0 else None


def _write(path: Path, content: bytes) -> Path:
    if not path.is_file() or path.read_bytes() != content:
        beside = path.with_name(path.name + ".tmp")
        beside.write_bytes(content)
        beside.replace(path)
    return path
