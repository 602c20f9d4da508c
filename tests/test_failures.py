"""What must not happen to a run: a bad step in the weights, a rank that goes its own way, a message printed twice.

Background: a check for NaN that runs when metrics are logged comes after the update; an error on one rank leaves its
peers in a collective; a full disk takes the last good checkpoint with it.
"""

import json
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from dist import agree
from tests.tiny import fork_train, losses, read_lines, run_train, train_ranks


def spoil(run, at: dict[int, str]) -> None:
    """On the last rank, make the loss (``nan``) or the gradient (``inf``) of the given steps non-finite."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def hook(module, arguments, output):
        kind = at.get(run.step + 1)
        if not last or not output.requires_grad:
            return output
        if kind == "inf":
            output.register_hook(lambda gradient: gradient * math.inf)
        return output * math.nan if kind == "nan" else output

    run.model.register_forward_hook(hook)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "gefen"])
@pytest.mark.parametrize("world_size, layout", [(1, "fsdp"), (2, "ddp"), (3, "fsdp")])
def test_bad_steps_are_skipped_by_all(optimizer: str, world_size: int, layout: str, tokens: Path, tmp_path: Path):
    settings = [f"parallel={layout}", f"optimizer={optimizer}", "microbatch=4", "log.interval=10"]

    def keep_before(run):
        spoil(run, {3: "nan", 4: "inf"})
        step, snapshots = run.observer.step, {}

        def observe(record):
            snapshots[record["step"]] = {
                name: tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()
                for name, tensor in train.tensors_of(run.model, run.optimizer.state_tensors()).items()
            }
            if record["step"] in (3, 4):
                before, after = snapshots[record["step"] - 1], snapshots[record["step"]]
                assert all(torch.equal(before[name], after[name]) for name in before), "a bad step touched the run"
            if record["step"] == 5:
                assert any(not torch.equal(snapshots[4][name], snapshots[5][name]) for name in snapshots[4])
            step(record)

        run.observer.step = observe

    results = train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / 'run'}", hook=keep_before)
    for result in results:
        assert [record["skipped"] for record in result["records"]] == [False, False, True, True, False, False]
        assert math.isnan(result["records"][2]["loss"]) and math.isfinite(result["records"][3]["loss"])
        assert len(result["ids"]) == 6, "a skipped step consumes its batch"
    clean = train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / 'clean'}")[0]
    assert results[0]["ids"] == clean["ids"]
    assert [r["lr"] for r in results[0]["records"]] == [r["lr"] for r in clean["records"]]
    events = [event for event in read_lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "skip"]
    assert [event["step"] for event in events] == [3, 4]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["train.nonfinite=stop"], "step 2: the loss is nan.*train.nonfinite=stop"),
        (["train.max_skips=1"], "2th step in a row; train.max_skips=1"),
    ],
)
def test_skips_are_bounded(overrides: list[str], message: str, tokens: Path, tmp_path: Path):
    always = dict.fromkeys(range(2, 9), "nan")
    with pytest.raises(Exception, match=message):
        train_ranks(2, tokens, *overrides, f"run.dir={tmp_path}", hook=lambda run: spoil(run, always))


@pytest.mark.parametrize(
    "settings, message",
    [
        (["train.steps=0"], "error: train.steps=0 must be"),
        (["data=tokens", "data.path=/nowhere"], "error: "),
    ],
)
def test_a_wrong_configuration_is_not_started_again(settings: list[str], message: str, tmp_path: Path):
    ended = run_train([*settings, f"run.dir={tmp_path}"], processes=2, restarts=3)
    assert ended.returncode and ended.stderr.count(message) == 1, ended.stderr


def test_status_says_running_meanwhile(tokens: Path, tmp_path: Path):
    """A kill leaves this, not the outcome of an earlier start."""
    (tmp_path / "status.json").write_text('{"outcome": "done"}')

    def check(run):
        step = run.observer.step
        status = tmp_path / "status.json"
        run.observer.step = lambda record: (step(record), check_outcome(status))

    def check_outcome(status: Path):
        assert json.loads(status.read_text())["outcome"] == "running"

    train_ranks(2, tokens, "train.steps=2", f"run.dir={tmp_path}", hook=check)
    assert json.loads((tmp_path / "status.json").read_text())["outcome"] == "done"


STEP = 5


def broken(*arguments, **options):
    raise RuntimeError("broken on purpose")


def break_last_rank(fault: str) -> None:
    """Let ``fault`` happen in step STEP of the last rank, or while it opens the data."""
    if int(os.environ["RANK"]) != int(os.environ["WORLD_SIZE"]) - 1:
        return
    if fault == "data":
        train.open_data = broken
    build_run = train.build_run

    def build_broken_run(*arguments):
        run = build_run(*arguments)
        step = run.observer.step

        def break_at(record):
            step(record)
            if record["step"] == STEP:
                break_now(run, fault)

        run.observer.step = break_at
        return run

    train.build_run = build_broken_run


def break_now(run, fault: str) -> None:
    if fault == "forward":
        run.model.register_forward_pre_hook(broken)
    elif fault == "optimizer":
        run.optimizer.step = broken
    elif fault == "gradient":
        parameter = next(run.model.parameters())
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    elif fault == "loader":
        run.loader._dataset.batch = broken
    elif fault.startswith("exit"):
        os._exit(int(fault.split()[1]))
    elif fault == "no reader":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        sys.stdout = None
        raise KeyboardInterrupt
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "sleep":
        time.sleep(1000)


@pytest.mark.parametrize("processes, layout", [(2, "fsdp"), (3, "ddp"), (4, "fsdp")])
@pytest.mark.parametrize("fault", ["forward", "optimizer", "loader", "data"])
def test_an_error_on_one_rank_ends_all_and_is_told_once(
    fault: str, processes: int, layout: str, tokens: Path, tmp_path: Path
):
    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=1000", f"parallel={layout}"]
    ended = fork_train(processes, arguments, lambda: break_last_rank(fault))
    assert ended.statuses == [1] * processes, ended.errors
    assert len(ended.messages()) == 1, ended.errors
    assert "broken on purpose" in "".join(ended.errors)
    if fault == "data":
        assert not any(tmp_path.iterdir()), "no folder is filled for a run that cannot read its data"
    else:
        assert json.loads((tmp_path / "status.json").read_text())["outcome"] == "failed"


@pytest.mark.parametrize("optimizer", ["adamw", "gefen"])
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_a_gradient_that_one_rank_lacks_ends_all(optimizer: str, layout: str, tokens: Path, tmp_path: Path):
    """An update that sums over ranks would wait for ever, or add what does not belong together."""
    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=1000", f"parallel={layout}"]
    ended = fork_train(2, [*arguments, f"optimizer={optimizer}"], lambda: break_last_rank("gradient"))
    assert ended.statuses == [1, 1], ended.errors
    assert len(ended.messages()) == 1 and "has gradients of" in ended.messages()[0], ended.errors


def test_an_error_that_nobody_can_read_ends_the_run_all_the_same(tokens: Path, tmp_path: Path):
    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=1000", "log.console=false"]
    ended = fork_train(1, arguments, lambda: break_last_rank("no reader"))
    assert ended.statuses == [1] and ended.errors == [""]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["outcome"], status["error"]) == ("failed", "interrupted")


@pytest.mark.parametrize("death, status", [("exit 0", 0), ("exit 3", 3), ("kill", -9)])
def test_a_rank_that_vanishes_ends_all_and_nothing_saved_is_lost(death: str, status: int, tokens: Path, tmp_path: Path):
    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "checkpoint.interval=2"]
    ended = fork_train(2, [*arguments, "train.steps=1000"], lambda: break_last_rank(death))
    assert ended.statuses == [1, status], ended.errors
    assert len(ended.messages()) == 1, ended.errors
    again = fork_train(2, [*arguments, "train.steps=8"])
    assert again.statuses == [0, 0], again.errors
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))


def limit_files_of_last_rank(limit: int) -> None:
    """From step 3 on, files of the last rank cannot grow beyond ``limit`` bytes: a disk that is full."""
    build_run = train.build_run

    def build_limited_run(*arguments):
        run = build_run(*arguments)
        step = run.observer.step

        def observe(record):
            step(record)
            if record["step"] == 3 and int(os.environ["RANK"]) == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        run.observer.step = observe
        return run

    train.build_run = build_limited_run


def test_a_disk_that_fills_up_ends_all_and_leaves_the_checkpoint_before(tokens: Path, tmp_path: Path):
    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "checkpoint.interval=2"]
    # a save that runs behind the steps could meet the limit in step 2 already
    ended = fork_train(2, [*arguments, "checkpoint.async_save=false"], lambda: limit_files_of_last_rank(100_000))
    assert ended.statuses == [1, 1], ended.errors
    (message,) = ended.messages()
    assert "step 4 could not be written" in message and "lower checkpoint.keep" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert json.loads((tmp_path / "status.json").read_text())["outcome"] == "failed"
    assert fork_train(2, arguments).statuses == [0, 0]
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 7))


def test_a_rank_that_sleeps_is_not_waited_for(tokens: Path, tmp_path: Path):
    def fall_asleep() -> None:
        # the watch that ends the sleeper is patient for the sake of slower networks
        agree.FailureWatch.__init__.__defaults__ = (0.1, 0.5)
        break_last_rank("sleep")

    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "train.steps=1000"]
    ended = fork_train(2, [*arguments, "parallel.timeout_seconds=3"], fall_asleep)
    assert ended.statuses == [1, 1], ended.errors
    assert len(ended.messages()) == 1 and "Timed out waiting 3000ms" in ended.errors[0], ended.errors


def test_a_step_that_hangs_ends_all_with_their_stacks(tokens: Path, tmp_path: Path):
    """Long before the timeout of the collectives: told once, with the place of every rank on record."""
    settings = ["parallel.timeout_seconds=600", "health.hang_seconds=1", "health.hang_factor=3", "train.steps=1000"]
    arguments = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "memory.ledger_step=0", *settings]

    def fall_asleep() -> None:
        global STEP
        STEP = 8
        break_last_rank("sleep")

    ended = fork_train(2, arguments, fall_asleep)
    assert ended.statuses == [1, 1] and ended.seconds < 10, ended.errors
    assert len(ended.messages()) == 1 and "health.hang_factor=3" in ended.messages()[0], ended.errors
    stacks = [(tmp_path / f"stacks-rank{rank}.txt").read_text() for rank in (0,)]
    assert "train_step" in stacks[0]
    assert json.loads((tmp_path / "status.json").read_text())["outcome"] == "failed"


BAD_INPUT = [
    (["data.path=/nowhere"], "/nowhere"),
    (["data=stdlib", "data.dir=/nowhere", "data.path=null"], "python -m data.prepare"),
    (["model.vocab_size=257", "data.vocab_size=257"], "257"),
    (["model.max_seq_len=900000", "train.seq_len=800000"], "800000"),
    (["run.dir=/proc/nowhere"], "/proc/nowhere"),
    (["run.device=cuda"], "no GPU"),
    (["train.global_batch=13"], "global_batch=13"),
    (["train.stepz=3"], "train.stepz"),
    (["checkpoint.resume=3"], "checkpoint.resume=3"),
    (["optimizer.decay=[nothing.*]"], "matches no parameter"),
]


@pytest.mark.parametrize("arguments, words", BAD_INPUT, ids=[words for _, words in BAD_INPUT])
def test_bad_input_is_told_once(arguments: list[str], words: str, tokens: Path, tmp_path: Path):
    folder = tmp_path / "run"
    ended = fork_train(2, ["data=tokens", f"data.path={tokens}", f"run.dir={folder}", *arguments])
    assert all(status not in (0, None) for status in ended.statuses)
    (message,) = ended.messages()
    assert words in message
    assert "Traceback" not in "".join(ended.errors)
    assert not (folder / "checkpoints").exists()


def test_another_run_in_the_folder_is_refused_and_loses_nothing(tokens: Path, tmp_path: Path):
    settings = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "checkpoint.interval=3"]
    assert fork_train(1, settings).statuses == [0]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    twice = f"data.sources=[{{path: {tokens}, weight: 1}}, {{path: {tokens}, weight: 1}}]"
    for change, words in (
        (["model.dim=32"], "model.dim"),
        (["optimizer=sgd"], "optimizer.name"),
        (["data.path=null", twice], "trained on other data"),
    ):
        ended = fork_train(2, [*settings, *change])
        (message,) = ended.messages()
        assert ended.statuses == [1, 1] and words in message
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    # that a start was tried is on record; how the run stands is not for it to say
    assert {path.name for path in before if after.get(path) != before[path]} <= {"events.jsonl", ".lock"}


def test_the_whole_run_under_torchrun(tokens: Path, tmp_path: Path):
    settings = ["data=tokens", f"data.path={tokens}", f"run.dir={tmp_path}", "checkpoint.interval=2"]
    stopped = run_train([*settings, "train.stop_after=3"], 2)
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads((tmp_path / "status.json").read_text())["outcome"] == "preempted"
    assert run_train([*settings, "train.stop_after=4"]).returncode == 75
    done = run_train(settings, 2)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "done" and summary["steps"] == 6 and summary["world_size"] == 2
    assert summary["tokens"] == 6 * 12 * 32 and summary["mfu"] is None
    assert summary["optimizer_state_bytes_per_param"] == pytest.approx(8, rel=0.01)
    assert summary["val_loss"] == pytest.approx(summary["loss"], rel=0.2)
    for name in ("config.yaml", "events.jsonl", "metrics.jsonl", "loss.png", "checkpoints/step-00000006"):
        assert (tmp_path / name).exists(), name
    rates = [record["tokens_per_second"] * record["step_seconds"] for record in read_lines(tmp_path / "metrics.jsonl")]
    assert rates == pytest.approx([12 * 32] * 6)
    assert losses({"records": read_lines(tmp_path / "metrics.jsonl")}).isfinite().all()
