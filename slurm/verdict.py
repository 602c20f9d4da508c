"""What becomes of a job: ``train.sbatch`` asks before it starts the processes and after they have ended.

    python -m slurm.verdict begin <settings>           prints "done", or port, folder of logs and BEFORE
    python -m slurm.verdict end BEFORE RESTARTS <settings>    prints one of ``VERDICTS``

torchrun flattens exit statuses, so the outcome is read from ``status.json`` of the run folder. One that has not
changed since BEFORE is an earlier start's: then this one was refused or never got as far. Reasons go to standard error.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.checks import ConfigError
from conf.compose import load_config
from conf.schema import Config

VERDICTS = ("done", "failed", "restart", "requeue", "left")
# names that other parts of the program write (dist.run_folder, dist.out_of_memory, dist.step_folder)
STATUS_NAME = "status.json"
REPORTS_NAME = "out_of_memory.json"
CHECKPOINTS = "checkpoints/step-*"
# below the ports that systems give out by themselves (32768 and above on Linux)
FIRST_PORT, NUM_PORTS = 10_000, 20_000
# states in which the job is still the script's to requeue
RUNNING = "RUNNING"


@dataclass(frozen=True)
class Before:
    """What a run folder held when processes were started."""

    time: str | None
    """When ``status.json`` was written; None where there is none."""
    checkpoints: tuple[str, ...]
    """Names of the complete checkpoints."""
    reports: int
    """How often memory has run out."""


def rendezvous_port(job: int) -> int:
    """The port at which the nodes of job number ``job`` meet."""
    return FIRST_PORT + job % NUM_PORTS


def look(folder: Path) -> Before:
    """What ``folder`` holds now."""
    checkpoints = (path.name for path in folder.glob(CHECKPOINTS) if path.suffix != ".tmp")
    return Before(read(folder / STATUS_NAME, {}).get("time"), tuple(sorted(checkpoints)), len(reports_of(folder)))


def judge(
    config: Config, status: dict[str, Any], before: Before, now: Before, state: str, restarts: int
) -> tuple[str, str]:
    """The verdict, and its reason in words.

    ``status`` is what ``status.json`` holds, ``state`` what Slurm says of the job (``RUNNING`` unless it has decided
    to end it), ``restarts`` how many times processes may still be started anew.
    """
    outcome = status.get("outcome")
    if outcome == "done" and now.time != before.time:
        return "done", "the run has reached its last step"
    if state != RUNNING:
        return "left", f"Slurm ends this job ({state})"
    if now.time == before.time:
        return "failed", "the processes ended before training began; their message is above. Not started again"
    progress = now.checkpoints != before.checkpoints
    if outcome == "preempted":
        stop = config.train.stop_after
        if stop is not None and status["step"] >= stop:
            return "failed", f"train.stop_after={stop} is reached. Set it higher, or leave it out, and submit again"
        if not progress:
            return "failed", "no checkpoint was written. Give the job a longer --time, or the signal more seconds"
        return "requeue", f"stopped at step {status['step']}, and saved"
    if outcome == "oom":
        if now.reports > before.reports:
            return "restart", "memory has run out; the next start stays below what was tried"
        return "failed", "memory has run out, and nothing would be different the next time. Set a smaller microbatch"
    if outcome == "failed" and not status.get("secondary"):
        return "failed", f"{status.get('error', 'the run failed')}. Not started again"
    if restarts > 0:
        return "restart", f"processes were lost; {restarts - 1} further restarts are left"
    return "failed", "processes were lost again, and RESTARTS is used up"


def job_state() -> str:
    """Slurm's word on this job, as ``RUNNING``; ``UNKNOWN`` where it does not answer."""
    command = ["scontrol", "show", "job", "-o", os.environ["SLURM_JOB_ID"]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    words = dict(word.split("=", 1) for word in ended.stdout.split() if "=" in word)
    return words.get("JobState", "UNKNOWN")


def begin(config: Config) -> str:
    """What ``train.sbatch`` needs to start the processes, or ``done``. Raises ``ConfigError`` if they cannot start."""
    folder, status = folder_of(config), read(folder_of(config) / STATUS_NAME, {})
    if status.get("outcome") == "done" and status["step"] >= config.train.steps:
        return "done"
    port = rendezvous_port(int(os.environ["SLURM_JOB_ID"]))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {socket.gethostname()}, which follows from the job's number, cannot be used "
                f"({error.strerror}). Submit again: another job has another port."
            ) from None
    # a restart of the job must not write over the logs of what it follows
    name = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    before = json.dumps(asdict(look(folder)), separators=(",", ":"))
    # last, since the folder may have spaces
    return f"{port} {name} {before}"


def folder_of(config: Config) -> Path:
    """The run folder. Raises ``ConfigError`` where it would be another one at every start."""
    if config.run.dir is None:
        raise ConfigError(
            "run.dir is not set: a job that Slurm starts again would begin a new run. Set run.dir to a folder that all "
            "nodes see."
        )
    return Path(config.run.dir)


def read(path: Path, otherwise: Any) -> Any:
    """The JSON of ``path``, ``otherwise`` where there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return otherwise


def reports_of(folder: Path) -> list[Any]:
    """The times that memory has run out in this run."""
    return read(folder / REPORTS_NAME, [])


def main(arguments: list[str]) -> int:
    """The command of the module docstring; 2 after a configuration error."""
    mode, rest = arguments[0], arguments[1:]
    try:
        if mode == "begin":
            print(begin(load_config(rest, int(os.environ["SLURM_JOB_NUM_NODES"]) * processes_per_node())))
            return 0
        before, restarts, *overrides = rest
        config = load_config(overrides, int(os.environ["SLURM_JOB_NUM_NODES"]) * processes_per_node())
        folder, then = folder_of(config), json.loads(before)
        then = Before(then["time"], tuple(then["checkpoints"]), then["reports"])
        verdict, reason = judge(config, read(folder / STATUS_NAME, {}), then, look(folder), job_state(), int(restarts))
        print(f"job {os.environ['SLURM_JOB_ID']}: {verdict}: {reason}.", file=sys.stderr)
        print(verdict)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def processes_per_node() -> int:
    """Processes on each node, as ``train.sbatch`` exports it."""
    return int(os.environ["PROCESSES_PER_NODE"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
