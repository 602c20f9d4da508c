"""What the microbatch controller chooses, by memory: fake meters, fake ranks, brute-force optima.

Sizes are in bytes of a small fake device; the floor S is 100 unless a case says otherwise.
"""

import math
import random

import pytest

from memopt.microbatch import Candidate, Controller, DivergenceError, DoesNotFitError, Limits, Settings, candidates
from memopt.microbatch_memory import Curve
from tests.memopt.microbatch_simulator import FakeRun, affine, reduce_max, rewarding, with_settings

FLOOR = 100.0


def floor(step):
    return FLOOR


def largest_that_fits(run, peak=None, budget=None):
    peak, budget = peak or run.peak, budget or min(run.budgets)
    return max((one for one in run.candidates if peak(one, 0, 0) <= budget), key=lambda one: one.rows)


def random_lines(rng):
    """A largest of up to six lines, none of which starts below the floor."""
    lines = [(FLOOR + rng.random() ** 2 * rng.choice([10, 100]), rng.uniform(0, 40)) for _ in range(rng.randint(1, 6))]
    return lambda one, step=0, rank=0: max(fixed + slope * one.rows for fixed, slope in lines)


@pytest.mark.parametrize("per_row", [1, 3.7, 10, 25])
@pytest.mark.parametrize("rank_batch", [1, 2, 12, 37, 64])
def test_the_largest_that_fits_is_found_where_larger_is_faster(rank_batch, per_row):
    for budget in (130.0, 200.0, 555.0, 3000.0):
        peak = affine(FLOOR, per_row)
        run = FakeRun(rank_batch, [budget], peak, floor=floor).run(80)
        assert run.settled_at() == largest_that_fits(run), budget
        assert not run.overshoots


def test_it_starts_small_and_at_most_doubles():
    run = FakeRun(64, [10_000.0], affine(FLOOR, 1), floor=floor).run(60)
    assert run.rows[0] == 1
    assert all(after <= 2 * before for before, after in zip(run.rows, run.rows[1:23], strict=False) if after > before)
    assert run.settled_at().rows == 64


@pytest.mark.parametrize("seed", range(4))
def test_no_step_exceeds_the_budget_on_random_curves(seed):
    rng = random.Random(seed)
    for _ in range(250):
        rank_batch = rng.choice([8, 32, 64, 100, 257])
        peak = random_lines(rng)
        smallest, whole = peak(Candidate(1, 1)), peak(Candidate(rank_batch, 1))
        budget = smallest + rng.random() * (whole - smallest) * 1.1
        run = FakeRun(rank_batch, [budget], peak, floor=floor).run(40)
        assert not run.overshoots
        assert run.probes() <= math.log2(rank_batch) + 3
        # what is not taken could not be proved to fit from what was taken
        kept = max(run.trace, key=lambda one: one.rows)
        assert not any(
            FLOOR + one.rows / kept.rows * (peak(kept) - FLOOR) <= budget
            for one in run.candidates
            if kept.rows < one.rows <= 2 * kept.rows
        )


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_earlier_microbatches_are_part_of_the_floor_where_there_are_any(seed):
    """A step of one microbatch finds none: its peak says less of the steps of several."""
    rng = random.Random(seed)
    proved = 0
    for _ in range(150):
        rank_batch, gradients = rng.choice([8, 32, 64, 100]), rng.uniform(0, 200)
        lines = random_lines(rng)

        def peak(one, step=0, rank=0, lines=lines, gradients=gradients):
            return lines(one) + gradients * (one.accumulation > 1)

        smallest, half = peak(Candidate(1, 2)), peak(Candidate(rank_batch // 2, 2))
        budget = smallest + rng.random() * (half - smallest) * 1.1
        known = {"floor": floor, "gradients": (gradients, gradients)}
        run = FakeRun(rank_batch, [budget], peak, **known).run(40)
        assert not run.overshoots
        assert run.probes() <= math.log2(rank_batch) + 3
        blind = FakeRun(rank_batch, [budget], peak, floor=floor).run(40)
        proved += run.rows[-1] > blind.rows[-1]
    assert proved > 10, "knowing of them admits larger sizes"


def test_a_step_of_one_microbatch_bounds_those_of_several_with_their_gradients_added():
    one, several = Candidate(4, 1), Candidate(2, 2)
    curve = Curve([several, one], Settings(1000, margin=0.0))
    curve.settle_floor(Limits(1000, 100, gradients=(30, 40)))
    curve.measure(1, 180.0, None)
    assert curve.upper(0) == 180 + 40
    assert curve.lower(0) == 130 + (180 - 130) / 2
    curve.measure(0, 170.0, None)
    assert curve.upper(0) == 170.0
    # in the other direction nothing has to be added: whoever finds no gradients needs less
    other = Curve([several, one], Settings(1000, margin=0.0))
    other.settle_floor(Limits(1000, 100, gradients=(30, 40)))
    other.measure(0, 170.0, None)
    assert other.upper(1) == 130 + 2 * (170 - 130)
    assert other.lower(1) == 170 - 40


def test_a_kink_from_below_the_floor_costs_one_step_once():
    """Flat to 8 rows, then steep: no bound from smaller sizes sees it."""

    def peak(one, step, rank):
        return max(200.0, 200.0 + 50 * (one.rows - 8))

    run = FakeRun(64, [400.0], peak, floor=floor).run(400)
    assert [one.rows for _, one in run.overshoots] == [16]
    assert run.settled_at().rows in (8, 9, 10, 11)
    assert max(run.rows) == 16


@pytest.mark.parametrize("predicted_rows", [1, 2, 8, 16, 64])
def test_any_start_ends_at_the_same_size(predicted_rows):
    """Predictions that are much too low start too high; the size comes down and ends where it would have."""
    found = candidates(64)
    predicted = {one: 101.0 if one.rows <= predicted_rows else 1e6 for one in found}
    run = FakeRun(64, [300.0], affine(FLOOR, 10), floor=floor, options={"predicted": predicted}).run(80)
    assert run.rows[0] == predicted_rows
    assert run.settled_at() == largest_that_fits(run)
    assert len({one for _, one in run.overshoots}) == len(run.overshoots), "none is repeated"


def test_a_prediction_that_does_not_fit_is_not_started():
    predicted = {one: 100.0 + 10 * one.rows for one in candidates(64)}
    run = FakeRun(64, [300.0], affine(FLOOR, 10), floor=floor, options={"predicted": predicted}).run(60)
    assert run.rows[0] == 13, "16 rows are predicted at 260, and count 1.25 times as much as that; of 300 / 1.25"
    assert run.settled_at().rows == 16 and not run.overshoots


def test_steps_that_are_not_steady_do_not_count():
    """The first steps need less than all later ones: no optimizer state yet."""

    def peak(one, step, rank):
        return (100 if step >= 6 else 20) + 10 * one.rows

    run = FakeRun(32, [250.0], peak, floor=lambda step: 0.0, steady=lambda step: step >= 6).run(100)
    assert not run.overshoots
    assert run.settled_at().rows == 11, "15 rows would not do, and 16 fit before there was state"


@pytest.mark.parametrize("declared", ["added", "optimizer"])
def test_declared_peaks_count_before_they_are_seen(declared):
    def peak(one, step, rank):
        spike = 60 if step % 5 == 4 else 0
        if declared == "added":
            return 100 + 10 * one.rows + spike
        return max(100 + 10 * one.rows, 100 + spike)

    def run_with(budget, **options):
        return FakeRun(32, [budget], peak, floor=floor, steady=lambda step: step % 5 != 4, **options).run(50)

    run = run_with(270.0, **{declared: 60})
    assert not run.overshoots
    assert run.settled_at().rows == (11 if declared == "added" else 16)
    if declared == "added":
        assert run_with(270.0).overshoots, "the case shows nothing"
    else:
        with pytest.raises(DoesNotFitError):
            run_with(150.0, optimizer=60)


def test_margin_fragmentation_and_headroom():
    run = FakeRun(
        64, [1000.0], affine(FLOOR, 10), floor=floor, reserved=lambda peak: 1.2 * peak,
        settings=with_settings(margin=0.1, headroom_bytes=50),
    ).run(60)  # fmt: skip
    usable = 1000 * 0.9 / 1.2 - 50
    assert run.settled_at() == largest_that_fits(run, budget=usable)


@pytest.mark.parametrize("world", [1, 3])
def test_nothing_fits_is_one_error_on_every_rank(world):
    budgets = [1000.0] * (world - 1) + [105.0]
    run = FakeRun(8, budgets, affine(FLOOR, 10), floor=floor)
    run.run(1)
    vectors = [one.vote(run.limits(rank)) for rank, one in enumerate(run.controllers)]
    for controller in run.controllers:
        with pytest.raises(DoesNotFitError) as caught:
            controller.decide(reduce_max(vectors), {"parameters": 5, "codes": 9, "a": 1, "b": 2})
        message = str(caught.value)
        assert f"rank {world - 1}" in message and "1 rows x 8" in message
        for text in ("codes 0.00 MiB, parameters", "memory.budget_gib", "train.seq_len", "optimizer=gefen"):
            assert text in message
        assert "a 0.00" not in message


def test_a_floor_above_the_budget_is_an_error_before_the_first_step():
    run = FakeRun(8, [2.0 * 2**30], affine(3 * 2**30, 1), floor=lambda step: 3.0 * 2**30)
    with pytest.raises(DoesNotFitError, match=r"needs 3\.00 GiB; the budget of 2\.00 GiB leaves 2\.00 GiB.*3\.00 GiB"):
        run.run(1)
    assert not run.trace


def test_the_settled_size_ran_a_whole_step():
    for budget in (120.0, 170.0, 333.0, 5000.0):
        run = FakeRun(24, [budget], affine(FLOOR, 10), floor=floor).run(60)
        assert run.settled_at() in run.trace[: run.settled_step()]


@pytest.mark.parametrize("told", [True, False])
def test_freed_memory_is_used_and_needed_memory_given_back(told):
    interval = 10
    state = {"floor": 500.0}

    def peak(one, step, rank):
        return state["floor"] + 10 * one.rows

    run = FakeRun(64, [700.0], peak, floor=lambda step: state["floor"], settings=with_settings(interval=interval))
    run.run(40)
    assert run.settled_at().rows == 16
    state["floor"] = 300.0
    if told:
        run.changed("state was freed")
    run.run(4 if told else interval + 4)
    assert max(run.rows) == 32, "40 rows are no size; the next is 64"
    run.run(30)
    assert run.settled_at().rows == 32 and not run.overshoots
    state["floor"] = 560.0
    if told:
        before = len(run.trace)
        run.changed("state is needed")
        run.run(1)
        assert run.rows[before] <= 13, "before the next forward"
        assert not run.overshoots
    run.run(40)
    assert run.settled_at().rows == 13


def test_a_larger_floor_shrinks_within_the_known_sizes():
    """Sizes that ran before are known exactly: the largest that fits is taken at once, not half."""
    state = {"floor": 100.0}
    run = FakeRun(64, [760.0], lambda one, step, rank: state["floor"] + 10 * one.rows, floor=lambda s: state["floor"])
    run.run(60)
    assert run.settled_at().rows == 64
    state["floor"] = 430.0
    run.changed()
    run.run(1)
    assert run.rows[-1] == 32 and not run.overshoots


def test_longer_sequences_shrink_before_the_next_forward():
    scale = {"now": 1.0}
    run = FakeRun(32, [420.0], lambda one, step, rank: 100 + 10 * one.rows * scale["now"], floor=floor).run(60)
    assert run.settled_at().rows == 32
    scale["now"] = 2.0
    run.changed("sequence length", regime="seq 2048", scale=2.0)
    run.run(60)
    assert run.settled_at().rows == 16 and not run.overshoots
    assert run.controller.tokens_per_second(Candidate(32, 1)) is None, "times of the other length are forgotten"


def test_ranks_choose_as_the_tightest_would():
    rng = random.Random(3)

    def noisy(one, step, rank):
        return 100 + (10 + rank) * one.rows + rng.uniform(0, 2)

    budgets = [500.0, 390.0, 800.0, 420.0]
    run = FakeRun(32, budgets, noisy, floor=floor).run(100)
    alone = [FakeRun(32, [b], lambda o, s, r, k=k: noisy(o, s, k), floor=floor).run(100) for k, b in enumerate(budgets)]
    assert run.settled_at().accumulation == max(one.settled_at().accumulation for one in alone)
    assert not run.overshoots
    record = next(d.record for d in run.decisions if d.phase == "settled")
    assert record["tightest_rank"] == 3 and record["budget_bytes"] == 420


@pytest.mark.parametrize("tight", range(4))
def test_one_tight_coordinate_of_the_mesh_holds_all_back(tight):
    budgets = [10_000.0] * 4
    budgets[tight] = 200.0
    run = FakeRun(32, budgets, affine(FLOOR, 10), floor=floor).run(60)
    assert run.settled_at().rows == 8 and not run.overshoots


def corrupt_times(search):
    search.seconds[3] = 0.5


def corrupt_caps(search):
    search.caps.add(5)


def corrupt_step(search):
    search.step += 1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_times, r"seconds at 4 rows x 8 \(none\) is (-1|1\.\d+) on some and .* on others"),
        (corrupt_caps, r"ruled-out and visited sizes \(hash\) is"),
        (corrupt_step, r"step is 61 on some and 62 on others"),
    ],
)
def test_divergence_is_told_at_the_next_decision(corrupt, message):
    run = FakeRun(32, [10_000.0] * 2, affine(FLOOR, 1), floor=floor).run(60)
    corrupt(run.controllers[1]._search)
    run.changed()
    if corrupt is corrupt_step:
        for controller in run.controllers:
            controller._search.step += 1
    vectors = [one.vote(run.limits(rank)) for rank, one in enumerate(run.controllers)]
    for controller in run.controllers:
        with pytest.raises(DivergenceError, match=message):
            controller.decide(reduce_max(vectors))


def test_a_reservation_that_fails_on_one_rank_holds_all_back():
    run = FakeRun(32, [10_000.0] * 3, affine(FLOOR, 10), floor=floor, reserve=lambda extra, rank: rank != 1)
    run.run(60)
    assert set(run.rows) == {1}
    assert any("could not be reserved" in decision.reason for decision in run.decisions)
    run = FakeRun(
        32, [10_000.0] * 3, affine(FLOOR, 10), floor=floor, reserve=lambda extra, rank: rank != 1 or extra < 70
    )
    run.run(60)
    assert run.settled_at().rows == 11, "of 8, 11 and 16 rows the last are 80 bytes more, the middle ones 30"
    assert max(run.rows) == 11
    assert any("could not be reserved" in decision.reason for decision in run.decisions)
    before = len(run.reserved_bytes)
    run.run(100)
    assert len(run.reserved_bytes) == before, "nothing is reserved once settled"


def test_what_could_not_be_reserved_is_tried_again_when_memory_changed():
    room = {"bytes": 70}
    run = FakeRun(32, [10_000.0], affine(FLOOR, 10), floor=floor, reserve=lambda extra, rank: extra < room["bytes"])
    run.run(60)
    assert run.settled_at().rows == 11
    room["bytes"] = 10_000
    run.changed("freed")
    run.run(60)
    assert run.settled_at().rows == 32


def test_the_vector_depends_on_the_state_alone():
    """Same length at every decision, and no entry that is not a number."""
    run = FakeRun(32, [500.0] * 2, affine(FLOOR, 10), floor=floor)
    lengths = set()
    for _ in range(40):
        if run.controller.due():
            vectors = [one.vote(run.limits(rank)) for rank, one in enumerate(run.controllers)]
            lengths |= {len(vector) for vector in vectors}
            assert not any(math.isnan(entry) for vector in vectors for entry in vector)
        run.step()
    assert len(lengths) == 1


def test_settled_ranks_do_not_vote_between_intervals():
    run = FakeRun(32, [500.0] * 2, affine(FLOOR, 10), floor=floor, settings=with_settings(interval=50)).run(300)
    settled = run.settled_step()
    assert [step for step in run.votes if step > settled] == list(range(settled + 50, 300, 50))
    measured = [step for step, plan in enumerate(run.plans) if plan.measure and step > settled]
    assert measured == [step - 1 for step in run.votes if step > settled], "and measure just before"
    assert not any(plan.measure and plan.timed for plan in run.plans)


def test_a_free_meter_measures_every_step():
    run = FakeRun(32, [500.0], affine(FLOOR, 10), floor=floor, settings=with_settings(free_meter=True)).run(100)
    assert all(plan.measure for plan in run.plans[1:])
    assert run.settled_at().rows == 32 and not run.overshoots


def test_a_policy_that_recomputes_less_is_taken_where_it_fits():
    def peak(one, step, rank):
        return 100 + one.rows * (5 if one.policy == "full" else 40)

    def clock(one, step, rank):
        return (1.3 if one.policy == "full" else 1.0) * rewarding(one)

    def run_with(budget, clock=clock):
        settings = with_settings(entry_ratio=12.0)
        return FakeRun(32, [budget], peak, clock, floor, settings, ("full", "none")).run(200)

    for budget in (130.0, 180.0, 250.0, 400.0, 800.0, 1500.0):
        run = run_with(budget)
        assert not run.overshoots, budget
        fits = [one for one in run.candidates if peak(one, 0, 0) <= budget]
        # one row without recomputation may fit, but 12 times the activations of the first measured step do not
        if budget >= 180.0:
            best = min(clock(one, 0, 0) for one in fits)
            assert best / clock(run.settled_at(), 0, 0) >= 0.97, budget
    assert run_with(1500.0).settled_at() == Candidate(32, 1, "none")
    assert run_with(130.0).settled_at().policy == "full"


def test_policies_need_a_bound_on_each_other():
    with pytest.raises(ValueError, match=r"\(full, none\) need entry_ratio"):
        Controller(candidates(4, policies=("full", "none")), with_settings())


def test_limits_without_room_are_an_error():
    run = FakeRun(8, [100.0], affine(10, 1), floor=lambda step: 10.0, settings=with_settings(headroom_bytes=200))
    with pytest.raises(DoesNotFitError, match="more than the margin and headroom"):
        run.run(1)


def test_the_smallest_goes_on_without_its_margin_but_not_above_the_budget():
    state = {"floor": 50.0}
    run = FakeRun(
        4, [100.0], lambda one, step, rank: state["floor"] + one.rows, floor=lambda step: state["floor"],
        settings=with_settings(margin=0.1),
    ).run(30)  # fmt: skip
    state["floor"] = 86.0
    run.changed()
    run.run(30)
    assert run.settled_at().rows == 4 and run.settled_at() == run.trace[-1]
    state["floor"] = 95.0
    run.changed()
    run.run(3)
    assert run.rows[-1] == 1
    run = FakeRun(1, [100.0], lambda o, s, r: state["floor"], floor=lambda s: state["floor"])
    run.settings = with_settings(margin=0.1)
    run.controllers = [run.build(0)]
    state["floor"] = 50.0
    run.run(30)
    state["floor"] = 95.0
    run.changed()
    run.run(2)
    assert "without the margin" in run.decisions[-1].reason
    state["floor"] = 101.0
    run.changed()
    with pytest.raises(DoesNotFitError):
        run.run(1)


def test_a_decision_is_due_before_the_step():
    controller = Controller(candidates(4), with_settings())
    with pytest.raises(AssertionError, match="due"):
        controller.plan()
    controller.decide(controller.vote(Limits(1000, 10)))
    assert controller.plan().candidate == Candidate(1, 4)
