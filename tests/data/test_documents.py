"""Every kind of file, cut into any units, and each kind of bad input under each policy."""

import gzip
import json
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from conf.checks import ConfigError
from conf.schema import DataConfig
from data import documents
from data.documents import BadInput, Counts, list_inputs, listing_hash, plan_units, read_unit


def read(path: Path, policy: str = "error", **settings) -> tuple[list[str], dict[str, int]]:
    """Documents of a file or folder, and the counts that are not 0."""
    config = DataConfig(kind="text", path=str(path), bad_input=policy, dir=str(path / "none"), **settings)
    counts = Counts()
    texts = [text for unit in plan_units(list_inputs(config)) for text in read_unit(unit, config, counts)]
    return texts, {name: number for name, number in counts.totals.items() if number}


def test_text_is_kept_as_it_is(tmp_path):
    texts = {
        "a.txt": "caf\u00e9\r\nx\0y\n\n",
        "b.md": "\ufeff# T\n",
        "c.PY": "\tx = 1\r",
        "d.txt": " \u2581\u0085\u2028 ",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    # a byte order mark at the start is an encoding signature, anywhere else it is text
    (tmp_path / "e.txt").write_bytes("\ufeffa\ufeffb".encode())
    read_texts, counts = read(tmp_path)
    assert read_texts == [texts["a.txt"], "# T\n", texts["c.PY"], texts["d.txt"], "a\ufeffb"]
    assert counts == {"documents": 5}


def test_folder_order_hidden_files_and_other_types(tmp_path):
    for name in ("z.txt", "B.txt", "a/x.txt", "a/.hidden.txt", ".git/y.txt", "data.bin", "none/old.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    # `none` is the folder that is being prepared
    assert read(tmp_path)[0] == ["B.txt", "a/x.txt", "z.txt"]


@pytest.mark.parametrize("text", ["", " ", "\n\t\r\n"])
@pytest.mark.parametrize("policy", ["error", "replace", "skip"])
def test_empty_documents_are_left_out_and_counted(text, policy, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    lines = [{"text": text}, {"text": None}, {"other": 1}, {"text": "good"}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    texts, counts = read(tmp_path, policy)
    assert texts == ["good"] and counts == {"documents": 1, "empty": 2, "missing_field": 2}


BAD = [
    # content, file and line in the message, documents under replace, counts, documents under skip, counts
    (b'{"text": "caf\xe9"}', "byte 0xE9 is not UTF-8", ["caf\ufffd"], "replaced", "skipped_bytes"),
    (b'{"text": "a"} {"text": "b"}', "not one JSON object", [], "broken", "broken"),
    (b'{"text": "cut mid-l', "not one JSON object", [], "broken", "broken"),
    (b'["text"]', "list instead of a JSON object", [], "broken", "broken"),
    (b'{"text": 5}', "field 'text' is int, not text", [], "broken", "broken"),
    (b"[" * 100000, "not one JSON object", [], "broken", "broken"),
    (b'{"text": "x\\ud800y"}', "half a surrogate pair", ["x\ufffdy"], "replaced", "skipped_bytes"),
]


@pytest.mark.parametrize(("line", "message", "replaced", "replace_count", "skip_count"), BAD)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_bad_records(line, message, replaced, replace_count, skip_count, suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    content = b'\xef\xbb\xbf{"text": "first"}\r\n\n' + line + b'\n{"text": "\\ud83d\\ude42 last"}'
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(BadInput, match=f"a{suffix}, line 3.*{message}.*data.bad_input=skip"):
        read(path)
    last = "\U0001f642 last"
    assert read(path, "replace") == (
        ["first", *replaced, last],
        {"documents": 2 + len(replaced), replace_count: 1},
    )
    assert read(path, "skip") == (["first", last], {"documents": 2, skip_count: 1})


def test_bad_bytes_in_a_text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo \xff\xfe three\n")
    with pytest.raises(BadInput, match=r"a\.txt, line 2: byte 0xFF is not UTF-8"):
        read(path)
    assert read(path, "replace") == (["one\ntwo \ufffd\ufffd three\n"], {"documents": 1, "replaced": 1})
    assert read(path, "skip") == ([], {"skipped_bytes": 1})


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip"])
def test_damaged_gzip(damage, tmp_path):
    path = tmp_path / "a.jsonl.gz"
    lines = [json.dumps({"text": f"document {number} " + "x" * (number * 7919 % 97)}) for number in range(3000)]
    content = gzip.compress("\n".join(lines).encode())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content = content[:2000] + bytes(64) + content[2064:]
    else:
        content = b"plain text"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.jsonl\.gz.*(cut or damaged|not one JSON|not UTF-8)"):
        read(path)
    texts, counts = read(path, "skip")
    assert counts["cut_files"] == 1 and len(texts) < 3000
    assert (len(texts) > 100) == (damage == "cut") or damage == "flipped"


@pytest.mark.parametrize("unit_bytes", [1, 17, 64, 1000, 10**9])
def test_a_large_jsonl_is_cut_at_lines(unit_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MIN_UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(documents, "UNITS", 10**9)
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"{number} " + "y" * (number * 31 % 90)}) for number in range(100)]
    path.write_text("\n".join(lines))
    texts, _ = read(path)
    assert [int(text.split()[0]) for text in texts] == list(range(100))
    lines[70] = "{broken"
    path.write_text("\n".join(lines))
    with pytest.raises(BadInput, match=r"a\.jsonl, line 71: not one"):
        read(path)


def write_parquet(path, values, kind=None, **settings):
    table = pyarrow.table({"id": range(len(values)), "text": pyarrow.array(values, type=kind)})
    pyarrow.parquet.write_table(table, path, **settings)


@pytest.mark.parametrize("kind", [None, pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())])
@pytest.mark.parametrize("unit_bytes", [1, 10**9])
def test_parquet(kind, unit_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MIN_UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(documents, "UNITS", 10**9)
    values = [f"row {number} caf\u00e9\n" for number in range(25)] + ["", None]
    write_parquet(tmp_path / "a.parquet", values, kind, row_group_size=4)
    texts, counts = read(tmp_path / "a.parquet")
    assert texts == values[:25] and counts == {"documents": 25, "empty": 1, "missing_field": 1}


def test_parquet_faults(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, ["x"])
    with pytest.raises(ConfigError, match=r"data.text_field=body is not a column of .*a\.parquet; it has id, text"):
        read(path, text_field="body")
    with pytest.raises(ConfigError, match=r"data.text_field=id of .*holds int64, not text"):
        read(path, text_field="id")
    invalid = pyarrow.array([b"good", b"caf\xe9"]).view(pyarrow.string())
    write_parquet(path, invalid)
    with pytest.raises(BadInput, match=r"a\.parquet, row group 0, row 1, byte 3: byte 0xE9"):
        read(path)
    assert read(path, "replace")[0] == ["good", "caf\ufffd"] and read(path, "skip")[0] == ["good"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"a\.parquet: the file is cut or damaged"):
        read(path)
    assert read(path, "skip") == ([], {"cut_files": 1})


def test_units_depend_on_the_listing_alone(corpus, monkeypatch):
    monkeypatch.setattr(documents, "MIN_UNIT_BYTES", 500)
    files = list_inputs(DataConfig(kind="text", path=str(corpus)))
    units = plan_units(files)
    assert units == plan_units(files) and len(units) > 3
    assert [unit.index for unit in units] == list(range(len(units)))
    assert sum(unit.size for unit in units) == sum(file.size for file in files)
    before = listing_hash(files), listing_hash(files, with_times=True)
    (corpus / "a.txt").write_bytes((corpus / "a.txt").read_bytes()[::-1])
    files = list_inputs(DataConfig(kind="text", path=str(corpus)))
    assert listing_hash(files) == before[0] and listing_hash(files, with_times=True) != before[1]
    (corpus / "new.txt").write_text("x")
    assert listing_hash(list_inputs(DataConfig(kind="text", path=str(corpus)))) != before[0]


def test_paths_that_hold_nothing(tmp_path):
    for path, message in (("none", "does not exist"), ("a.bin", "is none of .txt"), ("folder", "holds no file")):
        (tmp_path / "a.bin").touch()
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=f"data.path={tmp_path}/{path} {message}"):
            list_inputs(DataConfig(kind="text", path=str(tmp_path / path)))
    with pytest.raises(ConfigError, match="data=text needs data.path"):
        list_inputs(DataConfig(kind="text"))


def test_standard_library(monkeypatch, tmp_path):
    files = list_inputs(DataConfig())
    names = {file.name for file in files}
    assert {"json/decoder.py", "this.py", "asyncio/events.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/")[:-1])]
    assert 8e6 < sum(file.size for file in files) < 40e6
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match="data=stdlib found 0 bytes of source"):
        list_inputs(DataConfig())
