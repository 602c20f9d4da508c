"""What clusters do to a job, on two real nodes: ``make faults``."""

import json

import pytest

from tests.slurm.cluster import wait_for
from tests.slurm.conftest import Jobs
from tests.tiny import read_lines, train_ranks

pytestmark = pytest.mark.faults
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL")
# so many that Slurm has decided before they are done
SHORT = ("train.steps=200", "checkpoint.interval=10", "checkpoint.async_save=false")
# longer than any test, and saved only where it stops
LONG = ("train.steps=100000", "checkpoint.interval=1000000", "log.interval=100000")


def status(jobs: Jobs) -> dict:
    return json.loads((jobs.run / "status.json").read_text())


def resumed(jobs: Jobs) -> list[int]:
    return [event["step"] for event in read_lines(jobs.run / "events.jsonl") if event["kind"] == "resume"]


def wait_for_steps(jobs: Jobs, count: int) -> None:
    path = jobs.run / "metrics.jsonl"
    wait_for(lambda: path.exists() and len(path.read_text().splitlines()) > count, 90, f"{count} steps")


def check_unbroken(jobs: Jobs, tokens, folder) -> None:
    records = read_lines(jobs.run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 201))
    (whole, _) = train_ranks(2, tokens, *SHORT, f"run.dir={folder}")
    assert [record["loss"] for record in records] == [record["loss"] for record in whole["records"]]


def test_time_limit(jobs: Jobs):
    number = jobs.submit(*LONG, options=("--nodes=2", "--time=2", "--signal=USR1@60"))
    wait_for(lambda: jobs.cluster.job(number).get("Restarts") == "1", 180, "requeue")
    assert "requeue: stopped at step" in jobs.log()
    saved = int(next(jobs.run.glob("checkpoints/step-*")).name.removeprefix("step-"))
    wait_for(lambda: resumed(jobs) == [saved], 120, f"start from step {saved}")


def test_preemption(jobs: Jobs, tokens, tmp_path):
    number = jobs.submit(*SHORT)
    wait_for(lambda: any(jobs.run.glob("checkpoints/step-0000002?")), 90, "checkpoint")
    jobs.cluster.run("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=srun sleep 2")
    ended = jobs.cluster.wait_for_state(number, ENDED, 180)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), jobs.log()
    check_unbroken(jobs, tokens, tmp_path / "whole")


def test_cancel(jobs: Jobs):
    number = jobs.submit(*LONG)
    wait_for_steps(jobs, 5)
    jobs.cluster.run("scancel", number)
    ended = jobs.cluster.wait_for_state(number, ENDED, 30)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), jobs.log()
    wait_for(lambda: status(jobs)["outcome"] == "preempted", 10, "saved run")
    assert (jobs.run / "checkpoints" / f"step-{status(jobs)['step']:08}").is_dir()


def test_a_node_that_disappears(jobs: Jobs, tokens, tmp_path):
    number = jobs.submit(*SHORT)
    wait_for(lambda: any(jobs.run.glob("checkpoints/step-0000002?")), 90, "checkpoint")
    jobs.cluster.lose_node("n2")
    try:
        wait_for(lambda: jobs.cluster.job(number).get("Restarts") == "1", 90, "requeue")
    finally:
        print(jobs.log()[-3000:], jobs.cluster.job(number), jobs.cluster.node_states(), status(jobs))
        jobs.cluster.start_node("n2")
    ended = jobs.cluster.wait_for_state(number, ENDED, 180)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), jobs.log()
    check_unbroken(jobs, tokens, tmp_path / "whole")


def test_a_wrong_setting_is_not_tried_again(jobs: Jobs):
    number = jobs.submit("train.stepz=5")
    ended = jobs.cluster.wait_for_state(number, ENDED, 60)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    assert jobs.log().count("train.stepz: there is no such key") == 1


def test_a_run_that_fails_is_not_tried_again(jobs: Jobs):
    number = jobs.submit("data.path=/nowhere")
    ended = jobs.cluster.wait_for_state(number, ENDED, 90)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0")
    assert jobs.log().count("Not started again") == 1


def test_one_node_awkward_settings_and_nothing_left_to_do(jobs: Jobs):
    name = 'it\'s [a] = "b" $HOME, {c}'
    for _ in range(2):
        number = jobs.submit(f"run.name={name}", "optimizer.betas=[0.8,0.9]", options=("--nodes=1",))
        ended = jobs.cluster.wait_for_state(number, ENDED, 90)
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), jobs.log()
    from omegaconf import OmegaConf

    config = OmegaConf.load(jobs.run / "config.yaml")
    assert config.run.name == name and config.optimizer.betas == [0.8, 0.9]
    # the second start did nothing: no processes, so no event and no log of its own
    assert len([e for e in read_lines(jobs.run / "events.jsonl") if e["kind"] == "start"]) == 1
    assert len(list((jobs.folder / "logs").rglob("stdout.log"))) == 1
