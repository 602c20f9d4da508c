"""The microbatch controller across a stop, an out-of-memory error and a replay; what its log says."""

import json

import pytest

from memopt.microbatch import Candidate, Controller, DoesNotFitError, candidates
from tests.memopt.microbatch_simulator import TOKENS, FakeRun, affine, rewarding, with_settings

FLOOR = 100.0
FINGERPRINT = {"world": 2, "seq_len": 128, "budget": 300, "optimizer": "adamw", "policy": "none", "torch": "2.13.0"}


def started(fingerprint=FINGERPRINT, budget=300.0, rank_batch=64, floor=FLOOR, per_row=10, world=2, **options):
    return FakeRun(
        rank_batch, [budget] * world, affine(floor, per_row), floor=lambda step: floor,
        options={"fingerprint": fingerprint, **options},
    )  # fmt: skip


def resumed(state, **options):
    run = started(**options)
    state = json.loads(json.dumps(state))
    differences = [controller.load(state) for controller in run.controllers]
    assert differences[0] == differences[1]
    return run, differences[0]


@pytest.mark.parametrize("stop", [30, 200])
def test_a_resumed_run_goes_on_without_a_search(stop):
    state = started().run(stop).controller.state()
    run, differences = resumed(state)
    run.run(30)
    assert differences == [] and set(run.rows) == {16} and run.settled_at().rows == 16
    assert run.controller.tokens_per_second(Candidate(16, 4)) == TOKENS / rewarding(Candidate(16, 4))
    assert run.controller.tokens_per_second(Candidate(1, 64)) == pytest.approx(TOKENS / rewarding(Candidate(1, 64)))
    assert run.controller.state()["step"] == stop + 30
    assert not any(plan.measure for plan in run.plans)


@pytest.mark.parametrize("stop", [2, 4, 6, 12])
def test_a_search_that_was_stopped_goes_on(stop):
    first = started().run(stop)
    run, _ = resumed(first.controller.state())
    run.run(60)
    assert run.rows[0] == first.controller.candidate.rows
    assert run.settled_at().rows == 16 and not run.overshoots


@pytest.mark.parametrize(
    "changed", [{"world": 4}, {"seq_len": 256}, {"optimizer": "gefen"}, {"policy": "full"}, {"torch": "2.14.0"}]
)
def test_another_regime_starts_from_the_smallest(changed):
    state = started().run(60).controller.state()
    run, differences = resumed(state, fingerprint=FINGERPRINT | changed)
    ((key, value),) = changed.items()
    assert differences == [f"{key} {FINGERPRINT[key]} -> {value}"]
    run.run(60)
    assert run.rows[0] == 1 and run.settled_at().rows == 16


def test_another_batch_starts_from_the_smallest():
    state = started().run(60).controller.state()
    run, differences = resumed(state, rank_batch=32)
    assert differences == ["candidates"] and run.run(2).rows[0] == 1


@pytest.mark.parametrize(("budget", "rows"), [(150.0, 5), (300.0, 16), (800.0, 64)])
def test_another_budget_never_runs_what_does_not_fit_it(budget, rows):
    state = started().run(60).controller.state()
    run, differences = resumed(state, fingerprint=FINGERPRINT | {"budget": budget}, budget=budget)
    run.run(60)
    assert bool(differences) == (budget != 300.0)
    assert run.rows[0] == min(rows, 16) and run.settled_at().rows == rows
    assert not run.overshoots


def test_more_resident_memory_shrinks_before_the_first_forward():
    state = started().run(60).controller.state()
    run, differences = resumed(state, floor=200.0)
    run.run(60)
    assert differences == [] and run.rows[0] == 10 and not run.overshoots
    assert run.settled_at().rows == 10


def test_an_unknown_format_is_refused():
    state = started().run(3).controller.state() | {"format": 99}
    with pytest.raises(ValueError, match="format 99; this version reads 1"):
        resumed(state)


def test_a_size_that_ran_out_of_memory_is_never_tried_again():
    run = started(budget=10_000.0).run(60)
    assert run.settled_at().rows == 64
    for controller in run.controllers:
        controller.rule_out(Candidate(32, 2))
    before = len(run.trace)
    run.run(1)
    assert run.rows[-1] == 22
    run.changed("freed")
    run.run(100)
    assert max(run.rows[before:]) == 22
    run, _ = resumed(run.controller.state(), budget=10_000.0)
    assert max(run.run(100).rows) == 22
    run.changed("another sequence length", regime="seq 64", scale=0.5)
    assert max(run.run(100).rows) == 64, "another regime"


def test_a_cap_before_the_start_holds():
    run = started(budget=10_000.0)
    for controller in run.controllers:
        controller.rule_out(Candidate(8, 8))
    assert max(run.run(60).rows) == 7


def test_the_smallest_out_of_memory_is_an_error():
    run = started().run(60)
    for controller in run.controllers:
        controller.rule_out(Candidate(1, 64))
    with pytest.raises(DoesNotFitError, match="ran out of memory before"):
        run.run(1)


def test_a_log_replayed_runs_the_same_sizes():
    run = started()
    run.run(30)
    run.changed("freed")
    run.run(50)
    log = [json.loads(json.dumps(decision.record)) for decision in run.decisions if decision.notable]
    again = started(replay=log).run(80)
    assert again.trace == run.trace
    assert not again.votes and not any(plan.measure or plan.timed for plan in again.plans)


def test_a_log_of_other_candidates_is_refused():
    log = [{"step": 4, "rows": 48, "accumulation": 2, "policy": "none"}]
    with pytest.raises(ValueError, match=r"48 rows x 2 \(none\) after step 4"):
        Controller(candidates(64), with_settings(), replay=log)


def test_every_change_has_a_record():
    run = started(budget=500.0).run(100)
    log = [decision.record for decision in run.decisions if decision.notable]
    rows = [1, *[record["rows"] for record in log if record["accumulation"] != record["accumulation_before"]]]
    assert rows == [a for a, b in zip(run.rows, [0, *run.rows], strict=False) if a != b]
    grown = next(record for record in log if record["rows"] == 8)
    assert grown["use_bytes"] == 140 and grown["usable_bytes"] == grown["budget_bytes"] == 500
    assert grown["reason"] == "a larger one fits" and grown["phase"] == "probe" and grown["tightest_rank"] in (0, 1)
    settled = next(record for record in log if record["phase"] == "settled")
    assert settled["tokens_per_second_after"] == pytest.approx(TOKENS / rewarding(Candidate(32, 2)))
    assert settled["tokens_per_second_before"] is not None
    assert settled["step"] == run.settled_step()
