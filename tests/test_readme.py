"""What the README says can be typed, works as printed; what it says exists, exists."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conf.compose import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
TABLE_COMMANDS = re.findall(r"\| `((?:python|torchrun) [^`]*)`", README)
# set-up is what this test itself runs in
SET_UP = ("make ",)


def processes_of(command: str) -> int:
    """Processes that a command starts over all its nodes."""
    counts = [int(count) for count in re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", command)]
    return counts[0] * counts[1] if len(counts) == 2 else (counts or [1])[0]


@pytest.mark.parametrize("command", [c for c in COMMANDS + TABLE_COMMANDS if "train.py" in c])
def test_settings_compose(command: str):
    words = shlex.split(command)
    arguments = [word for word in words[words.index("train.py") + 1 :] if not word.startswith("--")]
    load_config(arguments, processes_of(command))


def test_there_are_commands_of_each_kind():
    text = "\n".join(COMMANDS + TABLE_COMMANDS)
    for kind in ("make train", "make test", "data.prepare", "torchrun", "observe.generate", "--help", "data=text"):
        assert kind in text, kind


def copy_of_the_tree(folder: Path) -> Path:
    """The files of the repository without what is ignored, as a clone would have them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def test_commands_run_as_printed(tmp_path: Path):
    clone, home = copy_of_the_tree(tmp_path / "clone"), tmp_path / "home"
    (home / "corpus").mkdir(parents=True)
    for path in sorted(clone.rglob("*.py")):
        shutil.copy(path, home / "corpus" / str(path.relative_to(clone)).replace("/", "."))
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    local = [command for command in TABLE_COMMANDS if "--" not in command or "print-config" in command]
    short = [f"{command} train.steps=2" if command == "python train.py" else command for command in local]
    for command in [*short, *COMMANDS]:
        if command.startswith(SET_UP):
            continue
        ended = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    assert (clone / "outputs" / "ddp" / "loss.png").is_file()


def test_the_tree_is_as_described():
    tree = re.search(r"## Where is what\n\n```text\n(.*?)```", README, re.DOTALL)
    assert tree is not None
    described = {line.split()[0].rstrip("/") for line in tree[1].splitlines() if not line.startswith(" ")}
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert described == folders | {"train.py"}


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_somewhere(target: str):
    assert (ROOT / target).exists()
