"""A job on two real nodes, requeued by Slurm in the middle: the run is the unbroken one."""

from tests.slurm.cluster import wait_for
from tests.slurm.conftest import Jobs
from tests.tiny import read_lines, train_ranks

STEPS = ("train.steps=60", "checkpoint.interval=5", "checkpoint.async_save=false")


def test_a_requeued_job_ends_as_the_unbroken_run(jobs: Jobs, tokens, tmp_path):
    number = jobs.submit(*STEPS)
    wait_for(lambda: any(jobs.run.glob("checkpoints/step-0000001?")), 60, "checkpoint")
    jobs.cluster.run("scontrol", "requeue", number)
    ended = jobs.cluster.wait_for_state(number, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 150)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), jobs.log()
    assert "done: the run has reached its last step" in jobs.log()

    records = read_lines(jobs.run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 61))
    events = read_lines(jobs.run / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "resume"][0] >= 10
    (whole, _) = train_ranks(2, tokens, *STEPS, f"run.dir={tmp_path / 'whole'}")
    assert [record["loss"] for record in records] == [record["loss"] for record in whole["records"]]
    assert [record["grad_norm"] for record in records] == [record["grad_norm"] for record in whole["records"]]
