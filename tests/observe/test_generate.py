"""Sampling from a checkpoint on one process, whatever it was saved with, and what is refused."""

import dataclasses
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conf.checks import ConfigError
from conf.compose import flatten
from conf.schema import Config, ModelConfig
from data.tokenizer import train_sentencepiece
from observe.generate import GenerateConfig, help_text, main, read_arguments
from tests.spawn import run_ranks

ROOT = Path(__file__).parents[2]
TEXT = ["def first(x):\n    return x + 1\n", "class Second:\n    value = 2\n"] * 50


def save_checkpoint(rank, world_size, folder, tokenizer_path):
    """A run of one step: sharded weights, some optimizer state, and what the trainer puts beside them."""
    import torch

    from data.tokenizer import load_tokenizer
    from dist.checkpoint import Checkpointer
    from dist.parallel import apply_parallel, build_mesh
    from models.build import build_model
    from models.init import init_weights
    from models.names import named_parameters

    tokenizer = load_tokenizer(tokenizer_path)
    model_config = ModelConfig(dim=16, layers=1, heads=2, hidden=32, vocab_size=tokenizer.vocab_size, max_seq_len=32)
    config = Config(model=model_config, microbatch=1)
    config.train.seq_len = 16
    model = build_model(model_config, 16, "cpu")
    mesh = build_mesh(config.parallel, world_size, "cpu")
    apply_parallel(
        model, mesh, config.parallel, compute_dtype=torch.float32, activation_checkpoint="none", compile_blocks=False
    )
    init_weights(model, seed=3, device=torch.device("cpu"))
    tensors = {f"model.{name}": parameter.detach() for name, parameter in named_parameters(model).items()}
    tensors["optimizer.moment.lm_head.weight"] = tensors["model.lm_head.weight"].clone()
    data = {"tokenizer": tokenizer.hash, "sources": [{"path": str(tokenizer_path)}]}
    checkpointer = Checkpointer(folder / "checkpoints", async_save=False)
    for step in (1, 2):
        checkpointer.save(step, tensors, {"step": step, "data": data, "config": flatten(config)})
    checkpointer.close()


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    path = folder / "tokenizer.model"
    path.write_bytes(train_sentencepiece(TEXT, 300))
    return path


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory, tokenizer_path):
    """World size of the save -> run folder."""
    folders = {}
    for world_size in (1, 3):
        folders[world_size] = tmp_path_factory.mktemp(f"world{world_size}")
        (folders[world_size] / "config.yaml").write_text("{}\n")
        run_ranks(world_size, save_checkpoint, folders[world_size], tokenizer_path)
    return folders


@pytest.fixture
def run_folder(run_folders):
    return run_folders[3]


def call_main(arguments, folder):
    """Child process: the output goes to files, the status is the exit code."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    logging.basicConfig(force=True)
    status = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@pytest.fixture
def generate(tmp_path):
    """Runs ``main`` in a fork: a process group must not be left in a process that other tests fork."""

    def run(*arguments):
        process = multiprocessing.get_context("fork").Process(target=call_main, args=(arguments, tmp_path))
        process.start()
        process.join(60)
        assert process.exitcode is not None
        return process.exitcode, (tmp_path / "out").read_text(), (tmp_path / "err").read_text()

    return run


def test_the_command_prints_the_prompt_and_its_continuation(run_folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "observe.generate", f"run.dir={run_folder}", "prompt=def ", "tokens=12"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ") and len(done.stdout) > len("def \n")


def test_the_number_of_processes_that_saved_does_not_matter(run_folders, generate):
    arguments = ("prompt=class ", "tokens=20", "seed=5", "run.device=cpu")
    samples = [generate(f"run.dir={folder}", *arguments) for folder in run_folders.values()]
    assert samples[0] == samples[1] and samples[0][0] == 0
    assert samples[0][1] != generate(f"run.dir={run_folders[1]}", *arguments, "seed=6")[1]


def test_no_prompt_starts_where_a_document_starts(run_folder, generate):
    status, text, _ = generate(f"run.dir={run_folder}", "tokens=5", "temperature=0")
    assert status == 0 and text.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokens=5"], "run.dir is not set"),
        (["run.dir={run}", "tokns=5"], "tokns=5: there is no such key here. The keys are run.dir, checkpoint"),
        (["run.dir={run}", "prompt"], "prompt: there is no such key"),
        (["run.dir={run}", "tokens=many"], "tokens=many must be a whole number"),
        (["run.dir={run}", "tokens=0"], "tokens=0 must be >= 1"),
        (["run.dir={run}", "temperature=-1"], "temperature=-1.0 must be >= 0"),
        (["run.dir={run}", "temperature=nan"], "temperature=nan must be >= 0"),
        (["run.dir={run}", "checkpoint=newest"], "checkpoint=newest is neither latest nor a step number"),
        (["run.dir={run}", "run.device=tpu"], "run.device=tpu is not one of"),
        (["run.dir={run}/absent"], "absent holds no run (no config.yaml)"),
        (
            ["run.dir={run}", "checkpoint=9"],
            "checkpoint=9, but .* (complete steps: 1, 2). Set one of these, or latest.",
        ),
        (["run.dir={run}", "tokenizer={other}"], "is not the tokenizer that the checkpoint was trained with"),
    ],
)
def test_what_cannot_work_is_one_line(run_folder, generate, tmp_path, arguments, message):
    other = tmp_path / "other.model"
    other.write_bytes(train_sentencepiece(TEXT, 290))
    status, _, error = generate(*(argument.format(run=run_folder, other=other) for argument in arguments))
    assert status == 2
    assert error.count("\n") == 1 and error.startswith("error: ")
    for part in message.split(".*"):
        assert part in error


def test_a_run_without_a_checkpoint(tmp_path, generate):
    (tmp_path / "config.yaml").write_text("{}\n")
    status, _, error = generate(f"run.dir={tmp_path}")
    assert status == 2 and "holds no complete checkpoint" in error


def test_latest_passes_over_a_damaged_checkpoint_and_changes_nothing(run_folder, tmp_path, generate):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    damaged = next(path for path in (folder / "checkpoints" / "step-00000002").iterdir() if path.suffix != ".json")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = sorted(path.name for path in folder.rglob("*"))
    status, _, error = generate(f"run.dir={folder}", "tokens=2")
    assert status == 0 and "step-00000002 is not used" in error
    status, _, error = generate(f"run.dir={folder}", "tokens=2", "checkpoint=2")
    assert status == 2 and "is damaged" in error
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_several_processes_are_refused(run_folder, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([f"run.dir={run_folder}"]) == 2
    assert "2 processes were started" in capsys.readouterr().err


def test_help_names_every_key(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert printed == help_text() + "\n"
    assert printed.count("(default") == len(dataclasses.fields(GenerateConfig))


def test_values_keep_their_signs_and_types():
    config = read_arguments(["run.dir=a", "prompt=x = 'y, z'", "tokens=7", "temperature=0.5", "top_k=0"])
    assert config == GenerateConfig(run_dir="a", prompt="x = 'y, z'", tokens=7, temperature=0.5, top_k=0)
    with pytest.raises(ConfigError):
        GenerateConfig()
