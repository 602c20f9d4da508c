"""Rounds of kill -9: a random rank dies at a random moment, the run is started again, and nothing may have changed.

A round is a function of its number: optimizer, layout and kind of save in turn, rank and moment from the seed. The
reference is the unbroken run of the same layout and microbatch. Each process notes the samples of every step it takes.
``python -m tests.faults.kills`` runs all rounds and writes ``bench/results/faults.json``.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import train
from dist import env
from tests.tiny import ROOT, TINY, fork_train, prepare_tokens, read_lines

ROUNDS = 30
KINDS = list(itertools.product(("adamw", "gefen", "rso"), ("fsdp", "ddp"), ("true", "false")))
STEPS = 40
WORLD_SIZE = 2
# of the launcher, which starts a dead group again by itself
LAUNCHED = 6
LIMIT_SECONDS = 10.0


@dataclass
class Kill:
    """Rank ``rank`` dies ``seconds`` after its first step has begun, or, where ``starting``, after its process has."""

    rank: int
    seconds: float
    starting: bool


def run_round(number: int, tokens: Path, folder: Path) -> dict[str, Any]:
    """Run round ``number``; raises AssertionError where anything differs from the unbroken run. Its record."""
    draw = random.Random(number)
    optimizer, layout, async_save = KINDS[number % len(KINDS)]
    settings = [
        "data=tokens", f"data.path={tokens}", f"optimizer={optimizer}", f"parallel={layout}", f"train.steps={STEPS}",
        f"checkpoint.async_save={async_save}", "checkpoint.interval=3", "microbatch=3", "memory.ledger_step=0",
        *(["optimizer.interval=4"] if optimizer == "rso" else []),
    ]  # fmt: skip
    reference = folder / f"reference-{optimizer}-{layout}"
    if not (reference / "summary.json").exists():
        start(settings, reference, None)
    broken = folder / f"round-{number}"
    took = sum(record["step_seconds"] for record in read_lines(reference / "metrics.jsonl"))
    kill = Kill(draw.randrange(WORLD_SIZE), draw.uniform(0, took), draw.random() < 0.15)
    record: dict[str, Any] = {
        "round": number, "optimizer": optimizer, "layout": layout, "async_save": async_save == "true", **vars(kill)
    }  # fmt: skip
    launched = number % LAUNCHED == LAUNCHED - 1
    if launched:
        launch(settings, broken, kill)
    else:
        record["gone_seconds"] = start(settings, broken, kill)
        start(settings, broken, None)
    record["launcher"] = "torchrun --max-restarts" if launched else "started again"
    starts = [event for event in read_lines(broken / "events.jsonl") if event["kind"] == "resume"]
    record["resumed_at"] = starts[-1]["step"] if starts else 0
    compare(reference, broken)
    return record


def start(settings: list[str], folder: Path, kill: Kill | None) -> float:
    """Train in ``folder`` to the end or to the kill. Seconds between the first process's end and the last one's."""
    ended = fork_train(WORLD_SIZE, [*settings, f"run.dir={folder}"], lambda: prepare(folder, kill))
    assert None not in ended.statuses, f"a process was left: {ended.statuses} {ended.errors}"
    assert ended.seconds < LIMIT_SECONDS, f"{ended.seconds} s until the last process was gone"
    if kill is None:
        assert ended.statuses == [0] * WORLD_SIZE, ended.errors
    return ended.seconds


def launch(settings: list[str], folder: Path, kill: Kill) -> None:
    """The same under torchrun, which starts all ranks again once one has died."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD_SIZE}",
        "--max-restarts=2", "-m", "tests.faults.kills", *TINY, *settings, f"run.dir={folder}",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KILL": json.dumps([str(folder), vars(kill)])}
    launcher = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip
    try:
        output, _ = launcher.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        # it ends its workers, by force after 30 s
        launcher.terminate()
        output, _ = launcher.communicate(timeout=60)
        raise AssertionError(f"not done after 180 s:\n{output[-5000:]}") from None
    assert launcher.returncode == 0, output[-5000:]


def prepare(folder: Path, kill: Kill | None) -> None:
    """In a rank: note the samples of every step, and die when it is time."""
    folder.mkdir(parents=True, exist_ok=True)
    step = train.train_step
    victim = kill is not None and kill.rank == env.rank()
    waiting = [kill.seconds] if kill is not None and victim else []

    def noted(run, batch):
        if waiting:
            die_after(waiting.pop())
        line = json.dumps({"step": run.step + 1, "ids": batch.sample_ids.tolist()}) + "\n"
        with (folder / f"samples{env.rank()}").open("a") as stream:
            stream.write(line)
        return step(run, batch)

    train.train_step = noted
    if kill is not None and kill.starting and waiting:
        die_after(waiting.pop())


def die_after(seconds: float) -> None:
    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def compare(reference: Path, broken: Path) -> None:
    """The losses of all steps bit for bit, and at every attempt at a step exactly its samples."""
    expected, found = (read_lines(path / "metrics.jsonl") for path in (reference, broken))
    for key in ("step", "loss", "grad_norm", "tokens"):
        assert [record[key] for record in found] == [record[key] for record in expected], key
    summaries = [json.loads((path / "summary.json").read_text()) for path in (reference, broken)]
    assert summaries[0]["val_loss"] == summaries[1]["val_loss"] is not None
    assert json.loads((broken / "status.json").read_text())["outcome"] == "done"
    for rank in range(WORLD_SIZE):
        wanted = {line["step"]: line["ids"] for line in read_lines(reference / f"samples{rank}")}
        assert sorted(wanted) == list(range(1, STEPS + 1))
        taken = read_lines(broken / f"samples{rank}")
        assert {line["step"] for line in taken} == set(wanted), "a step without its samples"
        assert all(line["ids"] == wanted[line["step"]] for line in taken), "samples of another step"


def main() -> None:
    """All rounds, and their record."""
    from bench.machine import write_result

    records = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = prepare_tokens(folder / "data")
        for number in range(ROUNDS):
            try:
                records.append({**run_round(number, tokens, folder), "passed": True})
            except AssertionError as error:
                records.append({"round": number, "passed": False, "error": str(error)})
            print(records[-1], flush=True)
    passed = sum(record["passed"] for record in records)
    slowest = max(record.get("gone_seconds", 0.0) for record in records)
    write_result("faults", {"passed": passed, "rounds": ROUNDS, "slowest_gone_seconds": slowest, "records": records})
    sys.exit(passed != ROUNDS)


def _worker(folder: str, kill: dict[str, Any]) -> None:
    from conf.command import read_command_line

    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    prepare(Path(folder), Kill(**kill) if first else None)
    sys.exit(train.main(read_command_line("train.py", sys.argv[1:], env.rank(), env.world_size())))


if __name__ == "__main__":
    if "KILL" in os.environ:
        _worker(*json.loads(os.environ["KILL"]))
    else:
        main()
