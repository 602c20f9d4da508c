"""What ``slurm.submit`` renders is what ``train.py`` gets; what is wrong is refused before anything is made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.checks import ConfigError
from slurm.submit import SCRIPT, main, read, render
from tests.tiny import ROOT

OVERRIDES = ["run.dir=/tmp/a b", 'run.name=it\'s [a] = "b" $HOME `x` \\ ;', "optimizer.betas=[0.9,0.95]"]


def test_the_script_holds_options_and_settings_unchanged(tmp_path: Path):
    script = render(["--nodes=2", "--comment=a b"], OVERRIDES, 4, Path("/tmp/a b"), "abc")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    settings, rest = script.split("set -uo pipefail")[0], script.split("set -uo pipefail")[1]
    assert rest.strip() == SCRIPT.read_text().split("set -uo pipefail")[1].strip()
    shown = subprocess.run(
        ["bash", "-c", settings + 'printf \'%s\\0\' "$PROCESSES_PER_NODE" "$@"'], capture_output=True, text=True
    )
    assert shown.stdout.split("\0")[:-1] == ["4", *OVERRIDES]
    # sbatch reads options only above the first command, and the last of two wins
    lines = script.splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines.index("#SBATCH --nodes=1") < lines.index("#SBATCH --nodes=2") < first
    assert lines.index("#SBATCH '--comment=a b'") < first
    for option in ("--requeue", "--signal=USR1@120", "--open-mode=append"):
        assert f"#SBATCH {option}" in lines


def test_processes_are_counted_for_the_rules():
    settings = ["run.dir=x", "train.global_batch=6", "microbatch=1"]
    assert read(["--nodes=3", "--gpus-per-node=h100:2", *settings])[2] is None
    assert read(["--nodes=3", "--processes-per-node=2", *settings])[:3] == (["--nodes=3"], settings, 2)
    with pytest.raises(ConfigError, match="train.global_batch=6"):
        read(["--nodes=4", "--gpus-per-node=1", *settings])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.steps=5"], "run.dir is not set"),
        (["run.dir=x", "train.stepz=1"], "train.stepz: there is no such key"),
        (["--nodes=two", "run.dir=x"], "--nodes=two must be a whole number"),
        (["--exclusive", "run.dir=x"], "--exclusive has no value"),
    ],
)
def test_wrong_arguments_are_refused_before_sbatch(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing may be started"))
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_dry_run_leaves_nothing_and_a_submission_keeps_the_script(tmp_path: Path):
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/submitted\n')
    (tmp_path / "sbatch").chmod(0o755)
    command = [sys.executable, "-m", "slurm.submit", f"run.dir={tmp_path}/run"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    dry = subprocess.run([*command, "--dry-run"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert dry.returncode == 0 and not (tmp_path / "run").exists() and not (tmp_path / "submitted").exists()
    wet = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert wet.returncode == 0 and wet.stdout == dry.stdout
    assert (tmp_path / "submitted").read_text() == dry.stdout == (tmp_path / "run" / "job.sbatch").read_text()
