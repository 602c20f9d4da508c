"""Token files: the right type, refused overflow, and every mismatch between file and sidecar found and named."""

import json

import numpy as np
import pytest

from data.shards import SIDECAR, ShardError, ShardWriter, TokenFiles, token_dtype


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "uint16"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (70000, "uint32")]
)
def test_type_follows_the_vocabulary_and_the_largest_id_survives(vocab_size, dtype, write_split):
    files = write_split([0, vocab_size - 1, 0], vocab_size)
    assert token_dtype(vocab_size).name == files.sidecar["dtype"] == dtype
    assert files.window(0, 3).tolist() == [0, vocab_size - 1, 0]
    files.verify()


@pytest.mark.parametrize("vocab_size", [0, -1, 2**32 + 1])
def test_vocabulary_that_no_type_holds(vocab_size):
    with pytest.raises(ShardError, match=f"a vocabulary of {vocab_size} ids cannot be stored"):
        token_dtype(vocab_size)


@pytest.mark.parametrize("wrong", [-1, 300, 65536, 70000, 2**40])
def test_writer_refuses_ids_outside_the_vocabulary(wrong, tmp_path):
    writer = ShardWriter(tmp_path / "split", 300, "hash", 100)
    with pytest.raises(ShardError, match=rf"token id {wrong} at position 1 of .*\(0 to 299\)"):
        writer.append(np.array([5, wrong]), np.array([2]))
    assert not (tmp_path / "split").exists()


@pytest.mark.parametrize("shard_tokens", [1, 3, 7, 10, 11, 100])
def test_windows_across_shards(shard_tokens, tmp_path):
    ids = np.arange(10) + 20
    writer = ShardWriter(tmp_path / "split", 100, "hash", shard_tokens)
    writer.append(ids[:4], np.array([1, 3]))
    writer.append(ids[4:], np.array([6]))
    sidecar = writer.close({"documents": 3})
    files = TokenFiles.open(tmp_path / "split")
    assert len(files) == sidecar["tokens"] == 10 and len(files.shards) == -(-10 // shard_tokens)
    assert files.documents.tolist() == [0, 1, 4]
    for start in range(10):
        for length in range(1, 11 - start):
            assert files.window(start, length).tolist() == ids[start : start + length].tolist()
    assert files.locate(9).endswith(f"{9 // shard_tokens:05d}.bin, token {9 % shard_tokens}")
    files.verify()


def test_empty_split(tmp_path):
    ShardWriter(tmp_path / "split", 300, "hash", 100).close({})
    files = TokenFiles.open(tmp_path / "split")
    assert len(files) == 0 and files.documents.size == 0
    files.verify()


def test_nothing_is_there_before_close_and_a_dead_writer_is_replaced(tmp_path):
    folder = tmp_path / "split"
    dead = ShardWriter(folder, 300, "hash", 2)
    dead.append(np.array([1, 2, 3]), np.array([3]))
    assert not folder.exists()
    writer = ShardWriter(folder, 300, "hash", 2)
    writer.append(np.array([7]), np.array([1]))
    writer.close({})
    assert TokenFiles.open(folder).window(0, 1).tolist() == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["split"]


def test_checksum_depends_on_tokens_order_documents_and_tokenizer(tmp_path):
    def checksum(ids, lengths, tokenizer="hash"):
        writer = ShardWriter(tmp_path / "split", 300, tokenizer, 100)
        writer.append(np.array(ids), np.array(lengths))
        return writer.close({"documents": 1})["checksum"]

    first = checksum([1, 2], [2])
    assert checksum([1, 2], [2]) == first
    assert len({first, checksum([2, 1], [2]), checksum([1, 2], [1, 1]), checksum([1, 2], [2], "other")}) == 4


def cut_file(folder):
    path = folder / "00000.bin"
    path.write_bytes(path.read_bytes()[:-2])


def odd_size(folder):
    with open(folder / "00000.bin", "ab") as file:
        file.write(b"\0")


def as_other_type(folder):
    # what a file written with 32 bits looks like to a reader of 16
    ids = np.fromfile(folder / "00000.bin", dtype="<u2").astype("<u4")
    ids.tofile(folder / "00000.bin")


def edit(**changes):
    def apply(folder):
        path = folder / SIDECAR
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_file, r"00000\.bin has 18 bytes, .* 10 tokens of uint16 = 20 bytes"),
        (odd_size, r"00000\.bin has 21 bytes"),
        (as_other_type, r"00000\.bin has 40 bytes, .*another dtype"),
        (lambda folder: (folder / "00000.bin").unlink(), r"00000\.bin does not exist"),
        (lambda folder: (folder / SIDECAR).unlink(), r"shards\.json does not exist"),
        (lambda folder: (folder / SIDECAR).write_text('{"format": 1'), r"shards\.json cannot be read"),
        (lambda folder: (folder / SIDECAR).write_text("[]"), r"has format None, this version reads 1"),
        (edit(format=2), r"has format 2, this version reads 1"),
        (edit(dtype="uint32"), r"says dtype uint32; 300 ids are stored as uint16"),
        (edit(tokens=11), r"do not add up to 11 tokens"),
        (edit(vocab_size=200), r"does not match its own checksum"),
        (edit(tokenizer_hash="other"), r"does not match its own checksum"),
        (edit(documents=3), r"documents\.npy holds \(1,\) int64, .*3 documents"),
        (lambda folder: (folder / "documents.npy").write_bytes(b"x"), r"documents\.npy cannot be read"),
    ],
)
def test_damage_is_found_at_opening(damage, message, write_split):
    files = write_split(np.arange(10))
    damage(files.folder)
    with pytest.raises(ShardError, match=message) as error:
        TokenFiles.open(files.folder)
    assert str(files.folder) in str(error.value)


def test_missing_key_in_the_sidecar(write_split):
    folder = write_split([1, 2]).folder
    content = json.loads((folder / SIDECAR).read_text())
    del content["vocab_size"], content["shards"]
    (folder / SIDECAR).write_text(json.dumps(content))
    with pytest.raises(ShardError, match="lacks shards, vocab_size"):
        TokenFiles.open(folder)


@pytest.mark.parametrize(
    ("value", "message"),
    [(7, r"00001\.bin does not match its checksum"), (300, r"token id 300 at position 2 of .*00001\.bin")],
)
def test_changed_token_is_found_by_verify(value, message, write_split):
    files = write_split(np.arange(10), shard_tokens=6)
    path = files.folder / "00001.bin"
    content = np.fromfile(path, dtype="<u2")
    content[2] = value
    content.tofile(path)
    opened = TokenFiles.open(files.folder)
    with pytest.raises(ShardError, match=message):
        opened.verify()


def test_moved_document_start_is_found_by_verify(write_split):
    files = write_split(np.arange(10), lengths=[4, 6])
    np.save(files.folder / "documents.npy", np.array([0, 5]))
    with pytest.raises(ShardError, match=r"documents\.npy does not match its checksum"):
        TokenFiles.open(files.folder).verify()
