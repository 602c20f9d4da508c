"""Text survives, markers are never text, and training fails with a range instead of a log line."""

import json
import re

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.checks import ConfigError
from data import tokenizer as module
from data.tokenizer import PROBES, SentencePieceTokenizer, load_tokenizer, train_sentencepiece
from tests.data.conftest import sentences

MARKER_TEXTS = ["<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "<|endoftext|>", "a</s>b", "<s><s>", "\u2581</s>\u2581"]
# the characters that trouble tokenizers, often enough to meet next to each other
TEXT = st.text(
    st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from(" \n\t\r\0\u2581\u2585\ufeff<s>/a"))
)


@pytest.mark.parametrize("kind", ["sp", "hf"])
def test_text_survives(kind, request):
    tokenizer = request.getfixturevalue(kind)

    @settings(max_examples=300, deadline=None)
    @given(TEXT)
    def survives(text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.bos_id, tokenizer.eos_id}.intersection(ids)
        assert all(0 <= token < tokenizer.vocab_size for token in ids)

    survives()


@pytest.mark.parametrize("kind", ["sp", "hf"])
@pytest.mark.parametrize("text", [*MARKER_TEXTS, *PROBES])
def test_markers_are_not_produced_from_text(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.bos_id, tokenizer.eos_id, 0}.intersection(ids), "0 is <unk> or <|endoftext|>"


@pytest.mark.parametrize("kind", ["sp", "hf"])
def test_batch_equals_single_and_markers_decode_to_nothing(kind, request):
    tokenizer = request.getfixturevalue(kind)
    texts = ["one two", "", " \u2581 three\n", "four"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.decode([tokenizer.eos_id, *tokenizer.encode("x y"), tokenizer.eos_id]) == "x y"
    with pytest.raises(ValueError, match=f"token id {tokenizer.vocab_size} is outside"):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(ValueError, match="token id -1 is outside"):
        tokenizer.decode([-1])


@pytest.mark.parametrize("kind", ["sp", "hf"])
def test_long_documents_are_cut_without_loss(kind, request, monkeypatch):
    monkeypatch.setattr(module, "MAX_ENCODE_CHARS", 50)
    tokenizer = request.getfixturevalue(kind)
    text = sentences(3, 20) + "x" * 333 + " \u2581 " + "\n" * 120 + "y"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "a"]) == [tokenizer.encode(text), tokenizer.encode("a")]


@pytest.mark.parametrize("kind", ["sp", "hf"])
def test_saved_tokenizer_is_the_same(kind, request, tmp_path):
    tokenizer = request.getfixturevalue(kind)
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.hash, again.bos_id, again.eos_id) == (tokenizer.hash, tokenizer.bos_id, tokenizer.eos_id)
    assert again.encode("the quick fox") == tokenizer.encode("the quick fox")


def test_newlines_and_indentation_become_pieces():
    code = "".join(f"def f{number}(x):\n        return x\n\n\n" for number in range(200))
    model = train_sentencepiece([code], 300)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = {processor.id_to_piece(token) for token in range(300)}
    assert {"\u2581" * 8, ":\n", "\n\n\n"} <= pieces
    assert len(processor.encode("        ")) == 1


def test_training_is_repeatable():
    assert train_sentencepiece([sentences(0, 50)], 300) == train_sentencepiece([sentences(0, 50)], 300)


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        (["one sentence"] * 3, 4000, r"vocab_size=4000 is more than this text can fill: at most (\d+)"),
        (["one sentence"] * 3, 100, r"vocab_size=100 does not hold .* at least (\d+)"),
    ],
)
def test_vocabulary_out_of_range_names_the_range(texts, vocab_size, message):
    with pytest.raises(ConfigError, match=message) as error:
        train_sentencepiece(texts, vocab_size)
    limit = int(re.search(message, str(error.value))[1])
    model = train_sentencepiece(texts, limit)
    assert sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size() == limit
    with pytest.raises(ConfigError):
        train_sentencepiece(texts, limit + (1 if vocab_size > limit else -1))


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_training_without_text(texts):
    with pytest.raises(ConfigError, match="no text to train a tokenizer on"):
        train_sentencepiece(texts, 300)


def test_long_lines_are_not_dropped():
    # one line of 9,000 characters, and nine of ten lines too long for the trainer's own limit
    line = sentences(5, 200).replace("\n", " ")[:9000]
    assert sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece([line], 320)).vocab_size() == 320
    rare = "zyzzyva qwertz " * 400
    model = train_sentencepiece([rare] * 9 + [sentences(6, 5)], 310)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model).encode("zyzzyva", out_type=str)
    assert pieces == ["zyzzyva"], "the long lines were not learnt from"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"bos_id": 0}, "bos_id=0 is also unk_id"),
        ({"bos_id": 5, "eos_id": 5}, "eos_id=5 is also bos_id"),
        ({"eos_id": 400}, r"eos_id=400 lies outside the vocabulary \(0 to 299\)"),
        ({"bos_id": -1}, "bos_id=-1 lies outside"),
        ({"symbols": ["<sep>", "<sep>"]}, "'<sep>' is taken"),
        ({"symbols": ["</s>"]}, "'</s>' is taken"),
        ({"symbols": ["<a b>"]}, "holds a space, quote or comma"),
        ({"symbols": ['"q"']}, "holds a space, quote or comma"),
        ({"symbols": [""]}, "is empty"),
    ],
)
def test_marker_ids_are_checked_before_training(ids, message):
    with pytest.raises(ConfigError, match=message):
        train_sentencepiece([sentences(0, 50)], 300, **ids)


def test_absent_markers_are_none(tmp_path):
    path = tmp_path / "none.model"
    path.write_bytes(train_sentencepiece([sentences(0, 50)], 300, bos_id=None, eos_id=None, symbols=["<sep>"]))
    tokenizer = load_tokenizer(path)
    assert tokenizer.bos_id is None and tokenizer.eos_id is None
    assert tokenizer.decode(tokenizer.encode("<sep>x")) == "<sep>x"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert processor.piece_to_id("<sep>") not in tokenizer.encode("a<sep>b")


def test_probes_find_a_lossy_tokenizer(sp, hf, huggingface_file, tmp_path):
    assert sp.lost_probe() is None and hf.lost_probe() is None
    settings_ = json.loads(huggingface_file.read_text())
    settings_["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings_))
    assert load_tokenizer(tmp_path).lost_probe() == PROBES[0]


def test_huggingface_markers_come_from_the_files_beside_it(huggingface_file, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(huggingface_file))
    tokenizer.add_special_tokens(["<start>", "<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<start>", "eos_token": {"content": "<end>"}})
    )
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_id, loaded.eos_id) == (tokenizer.token_to_id("<start>"), tokenizer.token_to_id("<end>"))
    assert load_tokenizer(huggingface_file).bos_id is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(ConfigError, match="names the eos marker '<nowhere>', which tokenizer.json does not have"):
        load_tokenizer(tmp_path)


def test_huggingface_marker_that_text_can_spell_is_refused(huggingface_file, tmp_path):
    settings_ = json.loads(huggingface_file.read_text())
    settings_["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings_))
    with pytest.raises(ConfigError, match="turns the text of a marker into the marker"):
        load_tokenizer(tmp_path)


def test_huggingface_truncation_and_padding_are_off(huggingface_file, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(huggingface_file))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox jumps over zebras"
    loaded = load_tokenizer(tmp_path)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.encode("a") == load_tokenizer(huggingface_file).encode("a")


@pytest.mark.parametrize("name", ["missing.model", "wrong.model", "wrong.json", "wrong.bin", "."])
def test_wrong_files(name, tmp_path):
    for wrong in ("wrong.model", "wrong.json", "wrong.bin"):
        (tmp_path / wrong).write_bytes(b"\0not a tokenizer")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        load_tokenizer(tmp_path / name)


def test_a_model_without_byte_pieces_is_lossy_not_wrong(tmp_path):
    import io

    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sentences(0, 50)]), model_writer=output, model_type="bpe", vocab_size=60, minloglevel=2
    )
    path = tmp_path / "plain.model"
    path.write_bytes(output.getvalue())
    tokenizer = SentencePieceTokenizer(path)
    assert tokenizer.lost_probe() is not None
    assert tokenizer.encode("the \u2581 fox")
