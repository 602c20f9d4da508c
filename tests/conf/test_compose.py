"""Settings: what is accepted, what is refused and with which words."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from conf import compose, rules
from conf.checks import ConfigError
from conf.compose import FOLDER, GROUPS, flatten, help_text, load_config, to_yaml
from conf.schema import Config

ROOT = Path(__file__).parents[2]
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((FOLDER / group).glob("*.yaml"))]
# what a choice needs before it can run
COMPANIONS = {
    "parallel=hsdp": ["parallel.shard=1"],
    "data=text": ["data.path=x"],
    "data=hf": ["data.path=x", "data.tokenizer=tokenizer.json"],
    "data=tokens": ["data.path=x"],
}


@pytest.mark.parametrize("group, choice", CHOICES)
def test_every_yaml_composes(group: str, choice: str):
    setting = f"{group}={choice}"
    config = load_config([setting, *COMPANIONS.get(setting, [])])
    assert isinstance(config, Config)


def test_every_group_has_choices():
    assert {group for group, _ in CHOICES} == set(GROUPS)


REFUSED = [
    (["train.stepz=3"], r"train\.stepz: there is no such key.*train\.steps"),
    (["a=1"], r"a: there is no such key"),
    (["+train.extra=1"], r"\+train\.extra=1: keys cannot be added"),
    (["++train.steps=1"], r"keys cannot be added"),
    (["~train.steps"], r"keys cannot be removed"),
    (["hydra.run.dir=x"], r"Hydra's own settings"),
    (["-m"], r"-m is not an option"),
    (["train.steps"], r"'train.steps' is not a setting"),
    (["train=3"], r"train is a section"),
    (["model=llama9"], r"no such model.*llama3_debug"),
    (["model@train=llama3_debug"], r"not a setting"),
    (["train.steps=abc"], r"train\.steps=abc must be a whole number"),
    (["train.steps=1.5"], r"train\.steps=1\.5 must be a whole number"),
    (["train.steps=true"], r"must be a whole number"),
    (["train.steps="], r"must be a whole number"),
    (["train.compile=3.5"], r"must be true or false"),
    (["optimizer.lr=abc"], r"optimizer\.lr=abc must be a number"),
    (["optimizer.lr=-1"], r"optimizer\.lr=-1\.0 must be a number >= 0"),
    (["optimizer.lr=nan"], r"optimizer\.lr=nan must be a number >= 0"),
    (["optimizer.betas=0.9"], r"optimizer\.betas must be a list"),
    (["optimizer.betas=[0.9]"], r"must be two numbers"),
    (["optimizer.betas=[0.9,1.0]"], r"must be two numbers in \[0, 1\)"),
    (["optimizer=sgd", "optimizer.betas=[0.9,0.9]"], r"optimizer\.betas: there is no such key here"),
    (["optimizer=sgd", "optimizer.nesterov=true"], r"needs momentum"),
    (["optimizer=sgd", "optimizer.momentum=1"], r"optimizer\.momentum=1"),
    (["optimizer.eps=0"], r"optimizer\.eps=0\.0 must be a number > 0"),
    (["optimizer=gefen", "optimizer.partition=columns"], r"partition=columns is not one of row, fixed, paper, peaks"),
    (["optimizer=gefen", "optimizer.second_moment=full"], r"block, factored"),
    (["optimizer=gefen", "optimizer.momentum=4bit"], r"8bit, fp32"),
    (["optimizer=gefen", "optimizer.update=coded"], r"exact, quantised"),
    (["optimizer=gefen", "optimizer.backend=cuda"], r"auto, reference, numba, triton"),
    (["optimizer=gefen", "optimizer.levels=100"], r"levels=100 must be a power of two from 2 to 256"),
    (["optimizer=gefen", "optimizer.block=64"], r"block=64 with optimizer\.partition=row"),
    (["optimizer=gefen", "optimizer.partition=fixed"], r"block=None with optimizer\.partition=fixed"),
    (["optimizer=gefen", "optimizer.partition=fixed", "optimizer.block=0"], r"block=0 must be a number >= 1"),
    (["optimizer=gefen", "optimizer.partition=fixed", "optimizer.block=60"], r"block=60 does not divide.*of 320"),
    (["optimizer=gefen", "optimizer.max_update=0"], r"max_update=0\.0 must be a number > 0"),
    (["optimizer=gefen", "optimizer.refresh=-1"], r"refresh=-1 must be a number >= 0"),
    (["optimizer=gefen", "optimizer.drift_interval=-1"], r"drift_interval=-1"),
    (["optimizer=gefen", "optimizer.betas=[0.9,1.0]"], r"must be two numbers in \[0, 1\)"),
    (["optimizer=gefen", "optimizer.eps=0"], r"optimizer\.eps=0\.0 must be a number > 0"),
    (["model=gpt2_debug", "train.recompute_swiglu=true"], r"recompute_swiglu=true is for the SwiGLU"),
    (["optimizer=rso", "optimizer.rank=0"], r"rank=0 must be a number >= 1"),
    (["optimizer=rso", "optimizer.rank=1.5"], r"rank=1\.5 must be a whole number"),
    (["optimizer=rso", "optimizer.interval=0"], r"interval=0 must be a number >= 1"),
    (["optimizer=rso", "optimizer.projection=svd"], r"coordinate, haar, gaussian"),
    (["optimizer=rso", "optimizer.reset=keep"], r"reset"),
    (["optimizer=rso", "optimizer.inner=muon"], r"adamw, gefen, sgd"),
    (["optimizer=rso", "optimizer.dense=sgd"], r"adamw, gefen"),
    (["optimizer=rso", "optimizer.stall=1"], r"stall=1\.0 must lie in \[0, 1\)"),
    (["optimizer=rso", "optimizer.proximal=-1"], r"proximal=-1\.0 must be a number >= 0"),
    (["optimizer=rso", "optimizer.probed=-1"], r"probed=-1 must be a number >= 0"),
    (["optimizer=rso", "optimizer.lr_scale=0"], r"lr_scale=0\.0 must be a number > 0"),
    (["optimizer=rso", "optimizer.warmup=-1"], r"warmup=-1 must be a number >= 0"),
    (["optimizer=rso", "optimizer.momentum=1"], r"momentum=1\.0 must lie in \[0, 1\)"),
    (["optimizer.partition=row"], r"optimizer\.partition: there is no such key here"),
    (["schedule.kind=sine"], r"constant, linear, cosine, wsd"),
    (["schedule.min_ratio=2"], r"between 0 and 1"),
    (["train.precision=fp16"], r"auto, fp32, bf16"),
    (["train.nonfinite=ignore"], r"skip, rollback, stop"),
    (["train.spike=on"], r"off, skip, rollback, stop"),
    (["train.spike_sigmas=0"], r"train\.spike_sigmas=0\.0 must be a number > 0"),
    (["train.spike=rollback", "checkpoint.interval=0"], r"a rollback needs checkpoints"),
    (["train.nonfinite=rollback", "checkpoint.interval=0"], r"a rollback needs checkpoints"),
    (["train.steps=0"], r"train\.steps=0 must be a number >= 1"),
    (["microbatch=0"], r"microbatch=0 must be auto or a whole number"),
    (["microbatch=many"], r"microbatch=many must be auto or a whole number"),
    (["microbatch=2.5"], r"microbatch=2\.5 must be auto"),
    (["activation_checkpoint=some"], r"none, full, selective, auto"),
    (["activation_checkpoint=auto", "microbatch=4"], r"microbatch=4 fixes it"),
    (["activation_checkpoint=auto", "train.compile=true"], r"train\.compile=true compiles one choice"),
    (["memory.budget_gib=0"], r"memory\.budget_gib=0\.0 must be a number > 0"),
    (["memory.budget_gib=-2"], r"memory\.budget_gib=-2\.0 must be a number > 0"),
    (["memory.budget_gib=lots"], r"memory\.budget_gib"),
    (["memory.budget_gib=nan"], r"memory\.budget_gib=nan must be a number > 0"),
    (["memory.margin=1"], r"memory\.margin=1\.0 must lie in \[0, 1\)"),
    (["memory.headroom_gib=-1"], r"memory\.headroom_gib=-1\.0 must be a number >= 0"),
    (["memory.ledger_step=-1"], r"memory\.ledger_step=-1"),
    (["memory.min_microbatch=0"], r"memory\.min_microbatch=0"),
    (["memory.max_microbatch=0"], r"memory\.max_microbatch=0"),
    (["memory.min_microbatch=17"], r"above the 16 sequences that each of 1 ranks has"),
    (["memory.min_microbatch=4", "memory.max_microbatch=2"], r"memory\.max_microbatch=2 is below"),
    (["memory.replay=events.jsonl", "microbatch=2"], r"memory\.replay=/.*events\.jsonl makes the decisions"),
    (["memory.max_microbatch=2", "microbatch=2"], r"memory\.max_microbatch=2 bounds microbatch=auto"),
    (["parallel.tensor=2"], r"parallel\.tensor=2 is not supported"),
    (["parallel.pipeline=2"], r"parallel\.pipeline=2 is not supported"),
    (["parallel.context=2"], r"parallel\.context=2 is not supported"),
    (["model.experts=8"], r"model\.experts=8 is not supported"),
    (["model.dim=257"], r"not a multiple of model\.heads"),
    (["model.kv_heads=3", "model.heads=4", "model.dim=64"], r"model\.heads=4 is not a multiple of model\.kv_heads=3"),
    (["model.heads=4", "model.kv_heads=4", "model.dim=60"], r"odd width"),
    (["model.dropout=0.1"], r"family=gpt2 only"),
    (["model=gpt2_debug", "model.dropout=1"], r"model\.dropout=1"),
    (["model=gpt2_debug", "model.kv_heads=1"], r"family=llama3 only"),
    (["train.seq_len=100000000"], r"longer than model\.max_seq_len"),
    (["parallel.shard=2"], r"belongs to parallel=hsdp"),
    (["parallel=hsdp"], r"needs parallel\.shard"),
    (["parallel.timeout_seconds=0"], r"timeout_seconds=0"),
    (["data=text"], r"data=text needs data\.path"),
    (["data=hf", "data.path=x"], r"data=hf needs data\.tokenizer"),
    (["data=tokens"], r"either data\.path.*or data\.sources"),
    (["data.sources=[{path: a}]"], r"belongs to data=tokens"),
    (["data=tokens", "data.sources=[{path: a, wait: 1}]"], r"there is no such key"),
    (["data=tokens", "data.sources=[{path: a, weight: 0}]"], r"must be a number > 0"),
    (["data=tokens", "data.sources=[{weight: 1}]"], r"without path"),
    (["data.vocab_size=1000000"], r"larger than model\.vocab_size"),
    (["model=gpt2_debug", "data.document_mask=true"], r"flex attention"),
    (["checkpoint.resume=newest"], r"auto, none or a step number"),
    (["checkpoint.keep=-1"], r"checkpoint\.keep=-1 must be a number >= 0"),
    (["checkpoint.interval=0", "train.stop_after=3"], r"saves none"),
    (["log.wandb.mode=maybe"], r"offline, online, disabled"),
    (["run.name="], r"non-empty name"),
    (["run.device=tpu"], r"auto, cpu, cuda"),
    (["model=null"], r"no such model"),
    (["model="], r"no such model"),
    (["model=../config"], r"no such model"),
    (["experiment=null"], r"no such experiment.*or leave it out"),
    (["=3"], r"'=3' is not a setting"),
    (["train.steps=null"], r"train\.steps cannot be null. Set for example train\.steps=100"),
    ([f"train.seed={10**23}"], r"train\.seed=1.* must be a number <="),
    (["parallel.timeout_seconds=1e300"], r"timeout_seconds=1e\+300 must be a number <="),
]


@pytest.mark.parametrize("overrides, message", REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_refused_with_value_rule_and_fix(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("train:\n  stepz: 3", r"train\.stepz: there is no such key here. Did you mean train\.steps"),
        ("a: 1", r"a: there is no such key"),
        ("train.steps: 3", r"train\.steps is written as one name"),
        ("log:\n  wandb:\n    mood: offline", r"log\.wandb\.mood: there is no such key.*log\.wandb\.mode"),
        ("data:\n  kind: tokens\n  sources: [{path: a, wait: 1}]", r"wait: there is no such key"),
        ("optimizer:\n  momentum: 0.9", r"optimizer\.momentum.*the chosen optimizer does not read it"),
        ("train:\n  steps: three", r"train\.steps=three must be a whole number"),
        ("train:\n  steps: null", r"train\.steps cannot be null"),
        ("train: 3", r"train is a section, not a value"),
        ("train:\n\tsteps: 3", r"not valid YAML.*mine\.yaml.*line 3"),
        ("train:\n  steps: 3\n  steps: 4", r"not valid YAML.*duplicate key steps"),
    ],
)
def test_a_fault_in_a_yaml_names_the_file_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
):
    shutil.copytree(FOLDER, tmp_path / "conf")
    monkeypatch.setattr(compose, "FOLDER", tmp_path / "conf")
    (tmp_path / "conf/experiment/mine.yaml").write_text(f"# @package _global_\n{text}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(["experiment=mine"])
    assert "\n" not in str(caught.value) and "conf/experiment/mine.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "overrides, world_size, message",
    [
        (["train.global_batch=16"], 3, r"not a multiple of 3 data-parallel ranks. Set it to 15 or 18"),
        (
            ["parallel=hsdp", "parallel.shard=3"],
            4,
            r"does not divide the 4 ranks of this run. Set it to one of 1, 2, 4",
        ),
    ],
)
def test_refused_for_this_number_of_processes(overrides: list[str], world_size: int, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides, world_size)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.document_mask=true"], "document_mask"),
        (["log.memory_snapshot=true"], "memory_snapshot"),
        (["optimizer=gefen", "optimizer.backend=triton"], "backend=triton runs on cuda only, and the device is cpu"),
    ],
)
def test_refused_on_cpu(overrides: list[str], message: str):
    config = load_config(overrides)
    rules.check_device(config, "cuda")
    with pytest.raises(ConfigError, match=message):
        rules.check_device(config, "cpu")


@pytest.mark.parametrize("text", ["1e3", "007", "true", "a=b", "x, y", "{z}", "it's", r"back\slash", "[1]", "nul"])
def test_text_is_taken_literally(text: str):
    assert load_config([f"run.name={text}"]).run.name == text


def test_paths_are_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(["run.dir=a/step=5", "data=text", "data.path=~/b", "data.dir=/c"])
    assert config.run.dir == str(tmp_path / "a/step=5")
    assert config.data.path == os.path.expanduser("~/b")
    assert config.data.dir == "/c"
    assert load_config(["run.dir=null"]).run.dir is None


def test_what_is_saved_gives_the_same_run():
    config = load_config(["model=gpt2_debug", "optimizer=sgd", "microbatch=3", "run.name=1e3"])
    saved = yaml.safe_load(to_yaml(config))
    assert saved == dataclasses.asdict(config)


def test_hash_names_the_settings_but_not_the_folder():
    first, moved, changed = (load_config(extra) for extra in ([], ["run.dir=elsewhere"], ["optimizer.lr=1e-4"]))
    assert compose.config_hash(first) == compose.config_hash(moved) != compose.config_hash(changed)


def test_help_lists_and_explains_every_key():
    text = help_text("python train.py")
    for key in [*flatten(load_config([])), "optimizer.momentum", "optimizer.betas"]:
        if key != "data.sources":
            assert f"  {key} (" in text, key
    assert "cannot" not in text.split("Keys:")[0]


def test_the_keys_are_frozen():
    """Adding a key is a visible act: change the list beside this file with it."""
    listed = (Path(__file__).parent / "keys.txt").read_text().split()
    assert sorted({key for key, _, _ in compose._keys(Config)}) == listed


@pytest.mark.parametrize("arguments, status, word", [(["--help"], 0, "usage"), (["train.steps=x"], 2, "whole number")])
def test_answers_without_loading_torch(arguments: list[str], status: int, word: str):
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "train.py", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == status
    assert word in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    # importing torch alone takes as long as this allows; the module list below is the real check
    assert time.perf_counter() - start < 30
    code = "import sys; import conf.command, dist.env; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_short_key_without_its_section_is_recognised():
    with pytest.raises(ConfigError, match=r"lr: there is no such key here. Did you mean optimizer\.lr\?"):
        load_config(["lr=3e-4"])


def test_help_shows_what_a_run_gets_and_may_be_cut_short():
    text = help_text("python train.py")
    assert "optimizer.weight_decay (float, default 0.1)" in text and "train.compile (bool, default false)" in text
    cut = subprocess.run(
        ["bash", "-c", f"{sys.executable} train.py --help | head -1"], cwd=ROOT, capture_output=True, text=True
    )
    assert cut.stdout.startswith("usage") and not cut.stderr
