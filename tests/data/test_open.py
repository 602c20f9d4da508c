"""What ``open_data`` refuses, and what a resumed run compares."""

import dataclasses
import json
import re

import numpy as np
import pytest

from conf.checks import ConfigError
from conf.schema import DataConfig, SourceConfig
from data.folder import RECORD
from data.loader import Loader, identity_changes, open_data
from data.prepare import prepare
from data.tokenizer import train_sentencepiece
from tests.data.conftest import sentences


def test_open(prepared, sp):
    data = open_data(prepared, 32, 330, 0)
    assert data.tokenizer.hash == sp.hash
    record = json.loads((open_path(prepared) / RECORD).read_text())
    assert (
        data.train.tokens == record["splits"]["train"]["tokens"]
        and data.val.tokens == record["splits"]["val"]["tokens"]
    )
    loader = Loader(data.train, 4, 0, 1)
    assert next(loader).tokens.shape == (4, 32)
    loader.close()
    assert json.loads(json.dumps(data.identity)) == data.identity


def open_path(config):
    from pathlib import Path

    return Path(config.dir)


def test_a_vocabulary_larger_than_the_models(prepared):
    with pytest.raises(ConfigError, match=r"model.vocab_size=329 is smaller than the tokenizer's 330 .*=330 or more"):
        open_data(prepared, 32, 329, 0)
    # padding is allowed, and never a target
    data = open_data(prepared, 32, 512, 0)
    assert data.train.gather(np.arange(len(data.train))).max() < 330


@pytest.mark.parametrize("kind", ["text", "stdlib", "hf"])
def test_folder_that_is_not_prepared_names_the_command(kind, tmp_path):
    config = DataConfig(
        kind=kind, path=None if kind == "stdlib" else "/corpus", dir=str(tmp_path / "none"), vocab_size=999
    )
    command = re.escape(f"Run: python -m data.prepare data={kind}")
    with pytest.raises(ConfigError, match=f"none does not exist. {command}.* data.dir={tmp_path}/none"):
        open_data(config, 32, 330, 0)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=f"not prepared, or not to the end. {command}.*data.vocab_size=999"):
        open_data(config, 32, 330, 0)


def test_tokens_needs_a_folder():
    with pytest.raises(ConfigError, match="data=tokens needs data.path"):
        open_data(DataConfig(kind="tokens"), 32, 330, 0)


def test_sequence_longer_than_the_data_names_both_counts(prepared):
    tokens = open_data(prepared, 32, 330, 0).train.tokens
    assert len(open_data(prepared, tokens - 1, 330, 0).train) == 1
    with pytest.raises(
        ConfigError, match=f"train.seq_len={tokens} needs at least {tokens + 1} training tokens; .* has {tokens}"
    ):
        open_data(prepared, tokens, 330, 0)


def test_sources(prepared, corpus, tmp_path):
    other = dataclasses.replace(prepared, dir=str(tmp_path / "other"), val_share=0.5, add_bos=True)
    prepare(other)
    mixed = DataConfig(kind="tokens", sources=[SourceConfig(prepared.dir, 3.0), SourceConfig(other.dir, 1.0)])
    data = open_data(mixed, 16, 330, 0)
    assert [source["weight"] for source in data.identity["sources"]] == [3.0, 1.0]
    ids = data.train.order.sample_ids(0, 4096)
    assert (ids < data.train.lengths[0]).mean() == 0.75
    single = open_data(DataConfig(kind="tokens", path=other.dir), 16, 330, 0)
    assert single.train.tokens == data.train.tokens - open_data(prepared, 16, 330, 0).train.tokens

    (tmp_path / "t.model").write_bytes(train_sentencepiece([sentences(9, 200)], 320))
    third = dataclasses.replace(prepared, dir=str(tmp_path / "third"), tokenizer=str(tmp_path / "t.model"))
    prepare(third)
    mixed.sources[1] = SourceConfig(third.dir)
    with pytest.raises(ConfigError, match=r"third were prepared with different tokenizers.*data.tokenizer="):
        open_data(mixed, 16, 330, 0)


def test_another_tokenizer_in_the_folder_is_found(prepared, tmp_path):
    (open_path(prepared) / "tokenizer.model").write_bytes(train_sentencepiece([sentences(9, 200)], 330))
    with pytest.raises(ConfigError, match="was written with another tokenizer"):
        open_data(prepared, 32, 330, 0)


def test_damage_that_only_a_checksum_shows(prepared):
    path = open_path(prepared) / "train" / "00000.bin"
    content = np.fromfile(path, dtype="<u2")
    content[5] ^= 1
    content.tofile(path)
    open_data(prepared, 32, 330, 0)
    with pytest.raises(ConfigError, match=r"00000\.bin does not match its checksum"):
        open_data(dataclasses.replace(prepared, verify=True), 32, 330, 0)


def test_split_of_another_folder(prepared, corpus, tmp_path):
    other = dataclasses.replace(prepared, dir=str(tmp_path / "other"), val_share=0.5)
    prepare(other)
    import shutil

    shutil.rmtree(open_path(prepared) / "val")
    shutil.copytree(open_path(other) / "val", open_path(prepared) / "val")
    with pytest.raises(ConfigError, match=r"val is not the split that .*prepared\.json describes"):
        open_data(prepared, 32, 330, 0)


def test_identity_names_what_changed_and_ignores_where_it_lies(prepared, tmp_path):
    identity = open_data(prepared, 32, 330, 0).identity
    moved = tmp_path / "moved"
    open_path(prepared).rename(moved)
    assert (
        identity_changes(identity, open_data(dataclasses.replace(prepared, dir=str(moved)), 32, 330, 0).identity) == []
    )
    config = DataConfig(kind="tokens", sources=[SourceConfig(str(moved), 2.0), SourceConfig(str(moved))])
    changes = " | ".join(identity_changes(identity, open_data(config, 16, 330, 0).identity))
    assert "seq_len: 32 in the checkpoint, 16 now" in changes
    assert "sources: 1 in the checkpoint, 2 now" in changes and "weight: 1.0 in the checkpoint, 2.0 now" in changes
    changed = identity | {"sources": [identity["sources"][0] | {"checksum": "x"}], "tokenizer": "y"}
    changes = " | ".join(identity_changes(changed, identity))
    assert "checksum: x in the checkpoint" in changes and "tokenizer: y in the checkpoint" in changes
