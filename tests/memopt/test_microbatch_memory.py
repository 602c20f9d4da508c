"""Bounds on what a size needs: true for every largest-of-lines curve, tight where they can be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.microbatch import Limits, candidates
from memopt.microbatch_memory import PREDICTION_FACTOR, Curve
from tests.memopt.microbatch_simulator import with_settings

FLOOR = 100.0
lines = st.lists(st.tuples(st.floats(FLOOR, 300), st.floats(0, 50)), min_size=1, max_size=6)


def measured(peaks, floor=FLOOR, policies=("none",), **changes):
    """A curve of 32 rows with ``peaks``: rows -> bytes, or (policy, rows) -> bytes; and the index of a size."""
    found = candidates(32, policies=policies)
    place = {(one.policy, one.rows): index for index, one in enumerate(found)}
    place |= {one.rows: index for index, one in enumerate(found) if one.policy == policies[0]}
    curve = Curve(found, with_settings(**changes))
    curve.settle_floor(Limits(1000, floor))
    for key, peak in peaks.items():
        curve.measure(place[key], peak, None)
    return curve, place


@settings(max_examples=300, deadline=None)
@given(lines, st.sets(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 32]), min_size=1, max_size=4))
def test_the_upper_bound_is_above_every_curve(some_lines, rows):
    def peak(m):
        return max(a + b * m for a, b in some_lines)

    curve, place = measured({m: peak(m) for m in rows})
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 32):
        assert curve.upper(place[m]) >= peak(m) * (1 - 1e-9)
        # the lower one is a bound for what is not measured, and exact for what is
        assert curve.lower(place[m]) <= peak(m) * (1 + 1e-9)


def test_bounds_are_tight():
    curve, place = measured({2: 120.0})
    assert curve.upper(place[4]) == 140.0 and curve.upper(place[8]) == 180.0
    assert curve.upper(place[1]) == 120.0, "a smaller size may need as much"
    curve, place = measured({2: 120.0, 8: 170.0})
    assert curve.upper(place[6]) == pytest.approx(120 + 50 * 4 / 6), "the chord between"
    assert curve.lower(place[16]) == pytest.approx(170 + 50 * 8 / 6), "the chord beyond"
    assert curve.upper(place[16]) == pytest.approx(240.0), "from the larger"
    curve, place = measured({2: 180.0, 8: 200.0})
    assert curve.upper(place[4]) == pytest.approx(180 + 20 / 3), "the chord between"


def test_a_floor_above_a_peak_is_none():
    curve, place = measured({2: 50.0}, floor=80.0)
    assert curve.upper(place[4]) >= 50.0


def test_a_line_from_below_the_floor_lowers_the_floor():
    """Peaks that grow faster than any line from the floor could: no bound may use that floor any more."""
    curve, place = measured({8: 200.0, 16: 600.0})
    assert curve.upper(place[32]) == pytest.approx(-200 + 2 * 800)
    assert curve.upper(place[11]) == pytest.approx(350.0)


def test_policies_bound_each_other():
    curve, place = measured({("full", 2): 110.0}, policies=("full", "none"), entry_ratio=3.0)
    assert curve.upper(place["none", 2]) == 130.0
    assert curve.upper(place["none", 1]) == 130.0
    curve, place = measured({("none", 2): 130.0}, policies=("full", "none"), entry_ratio=3.0)
    assert curve.upper(place["full", 2]) == 130.0 and curve.upper(place["full", 4]) == 160.0


def test_usable_takes_margin_fragmentation_and_headroom():
    curve, place = measured({}, margin=0.1, headroom_bytes=10)
    limits = Limits(1000, 100)
    assert curve.usable(limits) == 890
    curve.measure(place[4], 200.0, 240.0)
    assert curve.usable(limits) == pytest.approx(900 / 1.2 - 10)
    curve.measure(place[2], 150.0, 240.0)
    assert curve.fragmentation == pytest.approx(1.2), "what a larger size left behind does not count"


def test_declared_peaks():
    curve, _ = measured({})
    assert curve.need(200.0, Limits(1000, 100, added_bytes=30)) == 230
    assert curve.need(200.0, Limits(1000, 100, optimizer_bytes=150)) == 250
    assert curve.need(200.0, Limits(1000, 100, optimizer_bytes=50)) == 200


def test_stale_peaks_move_with_the_floor_and_never_serve_growth():
    curve, place = measured({2: 120.0, 8: 200.0})
    curve.outdate()
    curve.settle_floor(Limits(1000, 150))
    assert curve.upper(place[8]) == 250.0 and curve.upper(place[2]) == 170.0
    curve.measure(place[8], 260.0, None)
    assert curve.upper(place[2]) == 180.0, "a smaller one moves as the measured one did"
    assert curve.upper(place[16]) == 150.0 + 2 * 110.0, "a larger one is bounded by the fresh one"
    curve, place = measured({2: 120.0})
    curve.outdate(scale=2.0)
    assert curve.upper(place[2]) == 140.0


def test_a_peak_that_moves_is_noticed():
    curve, place = measured({2: 120.0, 8: 200.0}, floor=50.0)
    assert not curve.measure(place[8], 201.0, None)
    assert curve.measure(place[8], 170.0, None)
    assert curve.upper(place[8]) == 170.0 and curve.upper(place[2]) == pytest.approx(120.0 - 31)


def test_predictions_count_more_than_they_say():
    curve, place = measured({})
    curve.predict({place[2]: 100.0})
    assert curve.upper(place[2]) == PREDICTION_FACTOR * 100.0
