"""The same bytes for any number of workers and after any interruption; held-out documents; what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from conf.checks import ConfigError
from conf.schema import DataConfig
from data import documents, encode
from data import prepare as module
from data.folder import RECORD
from data.prepare import prepare
from tests.data.conftest import sentences
from tests.data.folders import content_of, documents_of, texts_of

ROOT = Path(__file__).parents[2]


def corpus_texts(corpus: Path) -> list[str]:
    lines = [json.loads(line)["text"] for line in (corpus / "d.jsonl").read_text().splitlines()]
    return [(corpus / name).read_text() for name in ("a.txt", "b.md", "deep/c.py")] + lines


def test_text_comes_back(prepared, corpus):
    train, val = texts_of(prepared, "train"), texts_of(prepared, "val")
    assert sorted(train + val) == sorted(corpus_texts(corpus))
    assert train and val and not set(train) & set(val)
    record = json.loads((Path(prepared.dir) / RECORD).read_text())
    assert record["counts"] == {"documents": 63}
    assert record["splits"]["train"]["documents"] == len(train) and record["splits"]["val"]["documents"] == len(val)
    sidecar = json.loads((Path(prepared.dir) / "train" / "shards.json").read_text())
    assert sidecar["counts"] == {"documents": 63}


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_markers_stand_exactly_where_asked(add_bos, add_eos, kind, tmp_path, request):
    file = request.getfixturevalue(f"{kind}_file")
    (tmp_path / "a.txt").write_text("one </s> <|endoftext|> two")
    (tmp_path / "b.txt").write_text("three")
    config = DataConfig(
        kind="text", path=str(tmp_path), dir=str(tmp_path / "made"), tokenizer=str(file), add_bos=add_bos,
        add_eos=add_eos, val_share=0.0, workers=1,
    )  # fmt: skip
    tokenizer = request.getfixturevalue({"sentencepiece": "sp", "huggingface": "hf"}[kind])
    if add_bos and tokenizer.bos_id is None:
        with pytest.raises(ConfigError, match="data.add_bos=true, but .* has no begin marker"):
            prepare(config)
        return
    prepare(config)
    before, after = [tokenizer.bos_id] * add_bos, [tokenizer.eos_id] * add_eos
    expected = [before + tokenizer.encode((tmp_path / name).read_text()) + after for name in ("a.txt", "b.txt")]
    assert documents_of(config, "train") == expected
    assert documents_of(config, "val") == []


def test_workers_do_not_change_a_byte(prepared, small_units):
    made = []
    for workers in (1, 3):
        config = dataclasses.replace(prepared, dir=f"{prepared.dir}{workers}", workers=workers, shard_tokens=700)
        prepare(config)
        made.append(content_of(config.dir))
    assert made[0] == made[1]
    assert {"train/00002.bin", "val/shards.json", "tokenizer.model"} <= made[0].keys()
    assert not [name for name in made[0] if name.startswith("parts") or name.endswith(".tmp")]


def test_equal_documents_are_never_on_both_sides(tmp_path, sentencepiece_file):
    texts = [f"document {number % 10}\n" for number in range(100)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = DataConfig(
        kind="text", path=str(path), dir=str(tmp_path / "made"), tokenizer=str(sentencepiece_file), val_share=0.4,
        workers=1,
    )  # fmt: skip
    prepare(config)
    train, val = texts_of(config, "train"), texts_of(config, "val")
    assert len(train) + len(val) == 100 and train and val
    assert not set(train) & set(val) and len(val) % 10 == 0


@pytest.mark.parametrize(
    ("texts", "val_share", "held_out"),
    [
        (["a", "b"], 1e-9, 1),
        (["a", "b"], 0.999999, 1),
        (["a", "b", "a", "a"], 1e-9, None),
        (["a"], 0.5, 0),
        (["a", "a", "a"], 0.999, 0),
        (["a", "b", "c"], 0.0, 0),
    ],
)
def test_neither_side_is_empty(texts, val_share, held_out, tmp_path, sentencepiece_file):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = DataConfig(
        kind="text", path=str(path), dir=str(tmp_path / "made"), tokenizer=str(sentencepiece_file), workers=1,
        val_share=val_share,
    )  # fmt: skip
    record = prepare(config)
    train, val = texts_of(config, "train"), texts_of(config, "val")
    assert train and not set(train) & set(val) and sorted(train + val) == sorted(texts)
    assert bool(val) == (held_out != 0) == ("val" in record["splits"])
    if held_out:
        assert len(val) == held_out


def test_held_out_share(tmp_path, sentencepiece_file):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": str(number)}) for number in range(3000)))
    config = DataConfig(
        kind="text", path=str(path), dir=str(tmp_path / "made"), tokenizer=str(sentencepiece_file), workers=1,
        val_share=0.1,
    )  # fmt: skip
    prepare(config)
    # 5 standard deviations of 3,000 fair draws
    assert abs(len(documents_of(config, "val")) - 300) < 5 * (3000 * 0.1 * 0.9) ** 0.5


def test_complete_folder_is_left_alone(prepared, monkeypatch):
    before = content_of(prepared.dir)
    times = {path: path.stat().st_mtime_ns for path in Path(prepared.dir).rglob("*")}
    monkeypatch.setattr(module, "_make", None)
    for _ in range(2):
        prepare(dataclasses.replace(prepared, workers=2))
    assert content_of(prepared.dir) == before
    assert {path: path.stat().st_mtime_ns for path in Path(prepared.dir).rglob("*")} == times
    shutil.rmtree(prepared.path)
    prepare(prepared)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"val_share": 0.3}, "data.val_share was 0.2, is 0.3"),
        ({"add_bos": True, "bad_input": "skip"}, "data.add_bos was False, is True; data.bad_input was error, is skip"),
        ({"tokenizer": None, "vocab_size": 300}, "data.tokenizer was .*, is None; data.vocab_size was None, is 300"),
        ({"shard_tokens": 5}, "data.shard_tokens"),
    ],
)
def test_other_settings_are_refused(change, message, prepared):
    before = content_of(prepared.dir)
    with pytest.raises(ConfigError, match=f"prepared with other settings: {message}.*Choose another data.dir"):
        prepare(dataclasses.replace(prepared, **change))
    assert content_of(prepared.dir) == before


def test_changed_input_is_refused(prepared, corpus):
    (corpus / "new.txt").write_text("more")
    with pytest.raises(ConfigError, match=r"the input of .* has changed: 4 files .* then, 5 files"):
        prepare(prepared)


def test_damaged_complete_folder_is_an_error(prepared):
    path = Path(prepared.dir) / "train" / "00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"00000\.bin has .* bytes"):
        prepare(prepared)


def test_folder_of_something_else_is_not_touched(prepared, tmp_path):
    folder = tmp_path / "mine"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds train and was not made by data.prepare"):
        prepare(dataclasses.replace(prepared, dir=str(folder)))
    assert list(content_of(folder)) == ["train/thesis.txt"]
    with pytest.raises(ConfigError, match="is a file. Set data.dir"):
        prepare(dataclasses.replace(prepared, dir=str(folder / "train" / "thesis.txt")))


def test_nothing_but_empty_documents(tmp_path, sentencepiece_file):
    path = tmp_path / "a.jsonl"
    config = DataConfig(
        kind="text", path=str(path), dir=str(tmp_path / "made"), tokenizer=str(sentencepiece_file), workers=1
    )
    path.write_text('{"text": ""}\n{"text": " "}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl holds no text \(2 empty\)"):
        prepare(config)
    path.write_text('{"body": "x", "id": 1}\n')
    with pytest.raises(ConfigError, match=r"1 missing field\). data.text_field=text is absent; a record has body, id"):
        prepare(dataclasses.replace(config, dir=str(tmp_path / "made2")))
    with pytest.raises(ConfigError, match="no text to train a tokenizer on"):
        prepare(dataclasses.replace(config, dir=str(tmp_path / "made3"), tokenizer=None))


def test_tokenizers_that_do_not_fit(prepared, huggingface_file, tmp_path):
    fresh = dataclasses.replace(prepared, dir=f"{prepared.dir}2")
    settings = json.loads(huggingface_file.read_text()) | {"normalizer": {"type": "Lowercase"}}
    lower = tmp_path / "lower.json"
    lower.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="does not give text back unchanged: 'Plain.* becomes 'plain"):
        prepare(dataclasses.replace(fresh, tokenizer=str(lower)))
    with pytest.raises(ConfigError, match="data=hf needs a tokenizer.json"):
        prepare(dataclasses.replace(fresh, kind="hf"))
    with pytest.raises(ConfigError, match="does not exist"):
        prepare(dataclasses.replace(fresh, tokenizer=str(tmp_path / "none.model")))
    with pytest.raises(ConfigError, match="data=tokens reads folders that are prepared already"):
        prepare(dataclasses.replace(fresh, kind="tokens"))
    prepare(dataclasses.replace(fresh, dir=f"{prepared.dir}3", tokenizer=str(lower), allow_lossy=True))
    prepare(dataclasses.replace(fresh, dir=f"{prepared.dir}4", kind="hf", tokenizer=str(huggingface_file)))


def test_long_lines_reach_tokenizer_and_tokens(tmp_path):
    line = sentences(0, 300).replace("\n", " ")[:9000]
    (tmp_path / "a.txt").write_text(line)
    config = DataConfig(kind="text", path=str(tmp_path / "a.txt"), dir=str(tmp_path / "made"), vocab_size=310)
    prepare(config)
    assert texts_of(config, "train") == [line]


def test_a_large_vocabulary_is_stored_wide(tmp_path, hf, huggingface_file):
    settings = json.loads(huggingface_file.read_text())
    settings["added_tokens"].append(settings["added_tokens"][0] | {"id": 70000, "content": "<end>"})
    for number in range(len(settings["model"]["vocab"]), 70000):
        settings["model"]["vocab"][f"unused{number}"] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (tmp_path / "a.txt").write_text("the fox")
    config = DataConfig(
        kind="hf", path=str(tmp_path / "a.txt"), dir=str(tmp_path / "made"), tokenizer=str(tmp_path / "tokenizer.json")
    )
    record = prepare(config)
    assert record["tokenizer"]["vocab_size"] == 70001
    assert documents_of(config, "train") == [[*hf.encode("the fox"), 70000]]
    sidecar = json.loads((tmp_path / "made" / "train" / "shards.json").read_text())
    assert sidecar["dtype"] == "uint32" and (tmp_path / "made" / "train" / "00000.bin").stat().st_size % 4 == 0


def test_training_text_is_a_bounded_spread_sample(corpus, small_units, monkeypatch):
    config = DataConfig(kind="text", path=str(corpus))
    units = documents.plan_units(documents.list_inputs(config))
    assert "".join(module._training_texts(units, config)) == "".join(
        text for unit in units for text in documents.read_unit(unit, config, documents.Counts())
    )
    monkeypatch.setattr(module, "TRAIN_TOKENIZER_BYTES", 1500)
    texts = list(module._training_texts(units, config))
    assert 700 < sum(map(len, texts)) <= 1500
    assert texts[0].startswith((corpus / "a.txt").read_text()[:100])
    assert set(texts) & {json.loads(line)["text"] for line in (corpus / "d.jsonl").read_text().splitlines()}


def test_parts_hold_bounded_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE_TOKENS", 10)
    lengths = np.array([3, 4, 5, 25, 1, 0, 9])
    hashes = np.array([1, 9, 1, 9, 9, 1, 1], dtype=np.uint64)
    part = encode.Part(np.arange(lengths.sum()), lengths, hashes, documents.Counts())
    sides = [list(module._documents_of(part, side, 5)) for side in (False, True)]
    ends = np.cumsum(lengths)
    for side, wanted in zip(sides, ([1, 3, 4], [0, 2, 5, 6]), strict=True):
        expected = [np.arange(ends[i] - lengths[i], ends[i]) for i in wanted]
        assert np.concatenate([tokens for tokens, _ in side]).tolist() == np.concatenate(expected).tolist()
        assert np.concatenate([sizes for _, sizes in side]).tolist() == lengths[wanted].tolist()
        assert max(tokens.size for tokens, _ in side) <= 25
