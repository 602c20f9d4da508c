"""The figures of a run against a clock and a count of one's own.

Background: tokens of one microbatch over the time of a whole step, or the reverse; tokens of one rank taken for all;
a count that starts anew after a resume; a rate that holds evaluations and saves.
"""

import time
from pathlib import Path

import pytest

import train
from tests.tiny import train_ranks

STEP_TOKENS = 12 * 32


def measure(run) -> dict[str, list]:
    """When each step ended, how long evaluating and saving took after it, and what is shown every few steps."""
    noted: dict[str, list] = {"at": [], "elsewhere": [0.0], "shown": []}

    def timed(function):
        def wrapped(*arguments):
            began = time.perf_counter()
            result = function(*arguments)
            noted["elsewhere"][-1] += time.perf_counter() - began
            return result

        return wrapped

    class Shown:
        name, every_step = "shown", False

        def step(self, record):
            noted["shown"].append(record)

        def event(self, record): ...

        def finish(self, summary): ...

        def close(self): ...

    train.evaluate, train.save, step = timed(train.evaluate), timed(train.save), run.meter.step

    def stepped(*arguments):
        figures = step(*arguments)
        noted["at"].append(time.perf_counter())
        noted["elsewhere"].append(0.0)
        return figures

    run.meter.step = stepped
    run.observer._sinks.append(Shown())
    return noted


@pytest.mark.parametrize("world_size, microbatch", [(1, 12), (2, 2)])
def test_tokens_and_rate_of_a_run_and_its_resume(world_size: int, microbatch: int, tokens: Path, tmp_path: Path):
    settings = ["log.interval=5", "train.eval_interval=4", "checkpoint.interval=5", "train.steps=20"]
    settings += [f"microbatch={microbatch}", f"run.dir={tmp_path}"]
    for first, extra in ((1, ["train.stop_after=10"]), (11, [])):
        result = train_ranks(world_size, tokens, *settings, *extra, hook=measure)[0]
        records, noted = result["records"], result["noted"]
        assert [record["tokens"] for record in records] == [STEP_TOKENS * step for step in range(first, first + 10)]
        # from the end of the first step, which warms up, to that of the last
        wall = noted["at"][-1] - noted["at"][0] - sum(noted["elsewhere"][1:-1])
        rates = [record["tokens_per_second"] for record in records[1:]]
        assert 9 * STEP_TOKENS / sum(STEP_TOKENS / rate for rate in rates) == pytest.approx(
            9 * STEP_TOKENS / wall, rel=0.02
        )
        assert all(r["tokens_per_second_per_device"] == r["tokens_per_second"] / world_size for r in records)
        for shown in noted["shown"]:
            seconds = [r["step_seconds"] for r in records if shown["step"] - 5 < r["step"] <= shown["step"]]
            assert shown["tokens_per_second"] == pytest.approx(5 * STEP_TOKENS / sum(seconds))
        assert [shown["step"] for shown in noted["shown"]] == [first + 4, first + 9]
