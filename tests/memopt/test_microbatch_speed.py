"""What the microbatch controller chooses, by speed: fake clocks with a known optimum, noise, outliers, retries."""

import math
import random
import time

import pytest

from memopt.microbatch import Candidate
from tests.memopt.microbatch_simulator import TOKENS, FakeRun, affine, rewarding, with_settings

FLOOR = 100.0


def run_with(seconds, rank_batch=64, budget=10_000.0, steps=500, **options):
    return FakeRun(rank_batch, [budget], affine(FLOOR, 10), seconds, lambda step: FLOOR, **options).run(steps)


def best_at(rows):
    """Fastest at ``rows``, 20 % slower at every doubling or halving away from it."""
    return lambda one, step=0, rank=0: 1.0 + 0.2 * abs(math.log2(one.rows / rows))


def flat(one, step=0, rank=0):
    return 1.0


def noisy(seconds, share, seed=0):
    def clock(one, step, rank):
        return seconds(one, step, rank) * (1 + random.Random(f"{seed} {step} {rank}").uniform(-share, share))

    return clock


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_the_fastest_is_kept_not_the_largest(rows):
    run = run_with(best_at(rows), rank_batch=16)
    assert max(run.rows) == 16 and run.settled_at().rows == rows
    assert run.exploration() <= 25


def test_equally_fast_ones_give_way_to_the_one_with_least_memory():
    run = run_with(lambda one, step, rank: 1.0 + (0.2 if one.rows < 8 else 0.0), rank_batch=16)
    assert run.settled_at().rows == 8


def plausible_clock(rng, rank_batch):
    """Work, an overhead for each microbatch, and perhaps a slope beyond some size (caches)."""
    overhead, knee, slope = rng.uniform(0.001, 0.3), rng.uniform(2, rank_batch), rng.choice([0.0, rng.uniform(0, 0.3)])
    return lambda one, step=0, rank=0: 1 + overhead * one.accumulation + slope * max(0.0, one.rows / knee - 1)


def test_settled_throughput_against_an_exhaustive_sweep():
    """Under clocks as models have them, in a memory that grows from the floor: at least 0.97 of the best."""
    rng, shares = random.Random(7), []
    for _ in range(150):
        rank_batch = rng.choice([4, 8, 16, 24, 32, 48, 64, 100, 128])
        clock = plausible_clock(rng, rank_batch)
        budget = FLOOR + 10 * rng.uniform(1, rank_batch * 1.2)
        run = run_with(clock, rank_batch, budget, steps=60)
        fits = [one for one in run.candidates if FLOOR + 10 * one.rows <= budget]
        shares.append(min(map(clock, fits)) / clock(run.settled_at()))
        kept = clock(run.settled_at())
        assert sum(clock(one) > kept for one in run.trace) <= 25
        assert not run.overshoots
    shares.sort()
    assert shares[3] >= 0.97 and shares[0] >= 0.94
    assert sum(shares) / len(shares) >= 0.99


@pytest.mark.parametrize(
    ("clock", "rank_batch"), [(rewarding, 32), (flat, 32), (best_at(16), 16), (best_at(8), 16), (best_at(4), 16)]
)
@pytest.mark.parametrize("seed", range(5))
def test_noise_changes_little(clock, rank_batch, seed):
    settings = with_settings(total_steps=1000)
    run = run_with(noisy(clock, 0.05, seed), rank_batch, steps=1000, settings=settings)
    assert run.changes() <= 8
    assert run.controller.phase == "settled"
    kept = clock(run.settled_at())
    assert sum(clock(one) > kept for one in run.trace) <= 50
    assert min(map(clock, run.candidates)) / kept >= 0.97


@pytest.mark.parametrize("rank_batch", [8, 32, 64, 128, 256])
@pytest.mark.parametrize("clock", [rewarding, best_at(3), best_at(20), flat])
def test_exploration_takes_five_per_cent(rank_batch, clock):
    run = run_with(clock, rank_batch)
    assert run.exploration() <= 25
    assert run.settled_step() <= 60


def test_times_are_medians_of_the_slowest_rank():
    """Every third step is ten times as long on some rank; one rank is slow at 8 rows alone."""

    def clock(one, step, rank):
        slow = 3.0 if one.rows == 8 and rank == 1 else 1.0
        return slow * (1.0 + 0.1 * one.accumulation) * (10.0 if step % 3 == rank == 0 else 1.0)

    run = FakeRun(8, [10_000.0] * 3, affine(FLOOR, 10), clock, lambda step: FLOOR).run(100)
    assert run.settled_at().rows == 4
    assert run.controller.tokens_per_second(Candidate(4, 2)) == pytest.approx(TOKENS / 1.2)


def test_disturbed_steps_do_not_count():
    """Evaluation on one rank: more than half of the steps take a hundred times as long."""

    def disturbed(step, rank):
        return rank == 1 and step % 5 != 0

    def clock(one, step, rank):
        return rewarding(one) * (100.0 * (1 + step) if step % 5 != 0 else 1.0)

    run = FakeRun(4, [10_000.0] * 2, affine(FLOOR, 10), clock, lambda step: FLOOR, disturbed=disturbed).run(200)
    assert run.settled_at().rows == 4
    assert run.controller.tokens_per_second(Candidate(4, 1)) == pytest.approx(TOKENS / 1.1)


def test_the_first_step_at_a_size_does_not_count():
    last = {}

    def clock(one, step, rank):
        first = last.get("one") != one
        last["one"] = one
        return rewarding(one) * (50.0 if first else 1.0)

    run = run_with(clock, steps=60)
    assert run.settled_at().rows == 64
    record = next(decision.record for decision in run.decisions if decision.phase == "settled")
    assert record["tokens_per_second_after"] == pytest.approx(TOKENS / 1.1)
    first_move = next(decision.record for decision in run.decisions if decision.new != decision.old)
    assert first_move["tokens_per_second_before"] == pytest.approx(TOKENS / (1 + 6.4)), "the start size, for comparison"


def test_a_slower_size_is_left_early_and_not_tried_again():
    run = run_with(best_at(16), rank_batch=16, steps=1000, settings=with_settings(interval=20, free_meter=True))
    assert run.settled_at().rows == 16
    tried = run.rows[run.rows.index(16) :]
    assert tried.count(8) <= 3, "one step is dropped and two decide"
    run.changed("freed")
    before = len(run.trace)
    run.run(200)
    assert set(run.rows[before:]) == {16}


def test_single_retries_are_ignored():
    settings = with_settings(interval=20, free_meter=True)
    retries = lambda one, step, rank: int(step < 30 or step % 7 == 0)  # noqa: E731
    run = run_with(rewarding, steps=300, settings=settings, retries=retries)
    assert run.settled_at().rows == 64


@pytest.mark.parametrize("thrash", [0.02, 0.5])
def test_persistent_retries_shrink_by_one_and_return_if_that_is_slower(thrash):
    """Retries at 64 rows from step 100 on. They cost 2 %, less than what 32 rows cost; or 50 %."""

    def retries(one, step, rank):
        return int(step >= 100 and one.rows == 64 and rank == 1)

    def clock(one, step, rank):
        return rewarding(one) * (1 + thrash if step >= 100 and one.rows == 64 else 1.0)

    settings = with_settings(interval=20, free_meter=True)
    run = FakeRun(
        64, [10_000.0] * 2, affine(FLOOR, 10), clock, lambda step: FLOOR, settings, retries=retries
    ).run(400)  # fmt: skip
    left = next(decision for decision in run.decisions if decision.reason == "allocations are being retried")
    assert left.step <= 130 and (left.old.rows, left.new.rows) == (64, 32)
    if thrash < 0.05:
        assert run.controller.phase == "locked" and run.settled_at().rows == 64
        assert sum(decision.reason == left.reason for decision in run.decisions) == 1
    else:
        assert run.controller.phase == "settled" and run.settled_at().rows == 32


def test_compiled_sizes_are_limited():
    run = run_with(rewarding, settings=with_settings(max_sizes=3), bounds={"divisors_only": True})
    assert len(set(run.rows)) == 3 and run.settled_at().rows == 4
    assert run.controller.phase == "locked"
    assert any("max_sizes=3" in decision.reason for decision in run.decisions)
    assert all(one.rows * one.accumulation == 64 for one in run.trace)


def test_changes_are_limited_but_memory_still_shrinks():
    state = {"floor": 100.0}
    run = FakeRun(
        64, [5000.0], lambda one, step, rank: state["floor"] + 10 * one.rows, rewarding, lambda step: state["floor"],
        with_settings(max_changes=4),
    ).run(50)  # fmt: skip
    assert run.controller.phase == "locked" and run.settled_at().rows == 16
    assert any("max_changes=4" in decision.reason for decision in run.decisions)
    state["floor"] = 4900.0
    run.changed()
    run.run(20)
    assert run.settled_at().rows == 10 and run.controller.phase == "locked" and not run.overshoots


def test_settled_steps_cost_nothing():
    run = run_with(rewarding, steps=60)
    controller = run.controller
    from memopt.microbatch import Sample

    start = time.perf_counter()
    for _ in range(100):
        assert not controller.due()
        controller.plan()
        controller.record(Sample(1.0))
    assert (time.perf_counter() - start) / 100 < 5e-4


def test_a_short_run_and_a_single_candidate():
    assert run_with(rewarding, steps=1).rows == [1]
    run = run_with(rewarding, rank_batch=1, steps=30)
    assert run.settled_at() == Candidate(1, 1) and run.changes() == 0
    run = run_with(rewarding, rank_batch=16, steps=30, bounds={"lowest": 4, "highest": 4})
    assert set(run.rows) == {4} and run.controller.phase == "settled"
