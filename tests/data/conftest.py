"""Small tokenizers and small prepared data, written by the code under test."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from conf.schema import DataConfig
from data import documents
from data.prepare import prepare
from data.shards import ShardWriter, TokenFiles
from data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer, train_sentencepiece

WORDS = "the quick brown fox jumps over lazy dogs while ten green birds sing in old trees near water".split()


def sentences(seed: int, count: int) -> str:
    """Repeatable text of ``count`` lines."""
    rng = np.random.default_rng(seed)
    return "".join(" ".join(rng.choice(WORDS, 9)) + f" {rng.integers(100)}.\n" for _ in range(count))


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    path.write_bytes(train_sentencepiece([sentences(0, 400)], 330))
    return path


@pytest.fixture(scope="session")
def huggingface_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE with one marker, as GPT-2 has."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentences(0, 400)], trainer)
    path = tmp_path_factory.mktemp("huggingface") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def sp(sentencepiece_file: Path) -> SentencePieceTokenizer:
    tokenizer = load_tokenizer(sentencepiece_file)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def hf(huggingface_file: Path) -> Tokenizer:
    return load_tokenizer(huggingface_file)


@pytest.fixture
def write_split(tmp_path: Path) -> Callable[..., TokenFiles]:
    """Write ids as a split: ``write_split(ids, vocab, shard_tokens, lengths)``."""
    made = []

    def write(ids, vocab_size: int = 300, shard_tokens: int = 1 << 20, lengths=None) -> TokenFiles:
        folder = tmp_path / f"split{len(made)}"
        made.append(folder)
        ids = np.asarray(ids)
        writer = ShardWriter(folder, vocab_size, "hash", shard_tokens)
        writer.append(ids, np.asarray([ids.size] if lengths is None else lengths))
        writer.close({})
        return TokenFiles.open(folder)

    return write


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with documents of every kind of file."""
    root = tmp_path / "corpus"
    (root / "deep").mkdir(parents=True)
    (root / "a.txt").write_text(sentences(1, 30))
    (root / "b.md").write_text("# Title\n\n" + sentences(2, 20))
    (root / "deep" / "c.py").write_text("def f(x):\n\treturn x\n")
    lines = [json.dumps({"text": sentences(10 + number, 3), "id": number}) for number in range(60)]
    (root / "d.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture
def prepared(tmp_path: Path, corpus: Path, sentencepiece_file: Path) -> DataConfig:
    """A configuration whose folder is complete."""
    config = DataConfig(
        kind="text", path=str(corpus), dir=str(tmp_path / "made"), tokenizer=str(sentencepiece_file), workers=1,
        val_share=0.2,
    )  # fmt: skip
    prepare(config)
    return config


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(documents, "MIN_UNIT_BYTES", 400)
