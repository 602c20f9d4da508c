"""Submit a training run: ``python -m slurm.submit [--dry-run] [sbatch's options] key=value ...``.

Options are handed to ``sbatch`` as ``--name=value``, settings to ``train.py``. The configuration is checked first. What
is submitted is ``slurm/train.sbatch`` with both written into it, kept as ``job.sbatch`` in the run folder, so that
``sbatch job.sbatch`` from the repository's root submits the same again. ``--dry-run`` prints it and leaves nothing.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from conf.checks import ConfigError
from conf.compose import load_config
from conf.schema import Config
from slurm.verdict import folder_of

SCRIPT = Path(__file__).with_name("train.sbatch")
# of the options of sbatch, those that decide the number of processes; the processes of a node are its GPUs
NODES, GPUS = ("--nodes", "-N"), ("--gpus-per-node", "--processes-per-node")


def render(options: Sequence[str], overrides: Sequence[str], processes: int | None, folder: Path, revision: str) -> str:
    """The batch script with sbatch's ``options`` and the settings ``overrides`` in it.

    ``processes`` is what ``PROCESSES_PER_NODE`` is set to, None to leave it to the GPUs of a node.
    """
    lines = SCRIPT.read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    output = [f"--output={folder}/slurm-%j.out", *options]
    header = [f"#SBATCH {shlex.quote(option)}" for option in output]
    body = [f"# git revision {revision}", f"set -- {shlex.join(overrides)}"]
    if processes is not None:
        body.append(f"export PROCESSES_PER_NODE={processes}")
    return "\n".join([*lines[:end], *header, *body, *lines[end:]]) + "\n"


def read(arguments: Sequence[str]) -> tuple[list[str], list[str], int | None, Config]:
    """Options for sbatch, settings, processes of a node where they are set, and the checked configuration.

    Raises ``ConfigError``, as for a run of as many processes as the options ask for.
    """
    options = [text for text in arguments if text.startswith("-")]
    overrides = [text for text in arguments if not text.startswith("-")]
    processes, nodes, gpus = None, 1, None
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"{option} has no value. Write options of sbatch as --name=value.")
        if name in (*NODES, *GPUS):
            # gpus may be written with their type
            number = value.rpartition(":")[2]
            if not number.isdecimal() or int(number) < 1:
                raise ConfigError(f"{option} must be a whole number above 0. Set for example {name}=2.")
            nodes = int(number) if name in NODES else nodes
            gpus = int(number) if name == "--gpus-per-node" else gpus
            processes = int(number) if name == "--processes-per-node" else processes
    config = load_config(overrides, nodes * (processes or gpus or 1))
    folder_of(config)
    return [text for text in options if not text.startswith("--processes-per-node")], overrides, processes, config


def main(arguments: list[str]) -> int:
    """Render, show, and submit unless ``--dry-run``; the exit status is sbatch's, 2 after a configuration error."""
    dry = "--dry-run" in arguments
    try:
        options, overrides, processes, config = read([text for text in arguments if text != "--dry-run"])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = folder_of(config)
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    script = render(options, overrides, processes, folder, described.stdout.strip() or "unknown")
    sys.stdout.write(script)
    if dry:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.sbatch").write_text(script)
    sys.stdout.flush()
    try:
        return subprocess.run(["sbatch", str(folder / "job.sbatch")]).returncode
    except FileNotFoundError:
        print("error: there is no sbatch here. Submit on a machine of the cluster, or use --dry-run.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
