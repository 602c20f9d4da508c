"""Throughput and the split of a step, against hand-built times."""

import time

import pytest
import torch

from observe import meter as meter_module
from observe.meter import PHASES, StepMeter

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def build_meter(clock, tokens_per_step=1000, world_size=2, flops=6e9, **options) -> StepMeter:
    return StepMeter(tokens_per_step, world_size, flops, CPU, clock=clock, **options)


def run_step(meter, clock, microbatches=1, seconds=4.0):
    """A step of ``seconds``: a quarter data, forward, backward, optimizer, in as many microbatches as asked."""
    for _ in range(microbatches):
        for name in ("data", "forward", "backward"):
            with meter.phase(name):
                clock.spend(seconds / 4 / microbatches)
    with meter.phase("optimizer"):
        clock.spend(seconds / 4)
    return meter.step()


def test_figures_of_a_step_by_hand():
    clock = Clock()
    meter = build_meter(clock, device_name="NVIDIA A100-SXM4-80GB")
    figures = run_step(meter, clock)
    assert figures["step_seconds"] == 4.0
    assert figures["tokens"] == 1000
    assert figures["tokens_per_second"] == 250.0
    assert figures["tokens_per_second_per_device"] == 125.0
    assert figures["mfu"] == pytest.approx(125 * 6e9 / 312e12)
    assert figures["step_split"] == {
        "data": 1.0,
        "forward": 1.0,
        "backward": 1.0,
        "reduce": 0.0,
        "optimizer": 1.0,
        "other": 0.0,
    }


@pytest.mark.parametrize("microbatches", [1, 4])
def test_accumulation_changes_nothing(microbatches):
    clock = Clock()
    figures = run_step(build_meter(clock), clock, microbatches)
    assert figures["tokens_per_second"] == 250.0
    assert figures["step_split"]["forward"] == pytest.approx(1.0)


def test_unknown_peak_or_flops_is_none():
    clock = Clock()
    assert run_step(build_meter(clock), clock)["mfu"] is None
    assert run_step(build_meter(clock, flops=None, device_name="NVIDIA H200"), clock)["mfu"] is None


def test_time_before_the_first_phase_does_not_count():
    clock = Clock()
    meter = build_meter(clock)
    clock.spend(100)
    assert run_step(meter, clock)["step_seconds"] == 4.0


def test_first_step_is_marked():
    clock = Clock()
    meter = build_meter(clock)
    assert [run_step(meter, clock)["steady"] for _ in range(3)] == [False, True, True]


def test_tokens_continue_after_a_resume():
    clock = Clock()
    meter = build_meter(clock, tokens=5000)
    assert [run_step(meter, clock)["tokens"] for _ in range(2)] == [6000, 7000]


def test_real_tokens_of_a_step_may_differ():
    clock = Clock()
    meter = build_meter(clock)
    with meter.phase("forward"):
        clock.spend(2)
    figures = meter.step(tokens=600)
    assert (figures["tokens"], figures["tokens_per_second"]) == (600, 300.0)


@pytest.mark.parametrize("when", ["before", "inside", "between"])
def test_pause_is_left_out(when):
    clock = Clock()
    meter = build_meter(clock)
    run_step(meter, clock)

    def evaluate():
        with meter.pause(), meter.phase("forward"):
            clock.spend(50)

    if when == "between":
        evaluate()
    with meter.phase("data"):
        if when == "inside":
            evaluate()
        clock.spend(1)
    if when == "before":
        evaluate()
    figures = meter.step()
    assert figures["step_seconds"] == 1.0
    assert figures["tokens_per_second"] == 1000.0
    assert figures["paused_seconds"] == 50.0
    assert (figures["step_split"]["data"], figures["step_split"]["forward"]) == (1.0, 0.0)
    assert run_step(meter, clock)["paused_seconds"] == 0.0


def test_time_outside_phases_is_other():
    clock = Clock()
    meter = build_meter(clock)
    with meter.phase("data"):
        clock.spend(1)
    clock.spend(0.5)
    figures = meter.step()
    assert figures["step_split"]["other"] == pytest.approx(0.5)
    assert sum(figures["step_split"].values()) == pytest.approx(figures["step_seconds"])


def test_nested_phase_is_charged_once():
    clock = Clock()
    meter = build_meter(clock)
    with meter.phase("backward"):
        clock.spend(1)
        with meter.phase("reduce"):
            clock.spend(2)
        clock.spend(3)
    split = meter.step()["step_split"]
    assert (split["backward"], split["reduce"]) == (4.0, 2.0)


def test_a_phase_that_fails_is_closed():
    clock = Clock()
    meter = build_meter(clock)
    with pytest.raises(RuntimeError), meter.phase("forward"):
        raise RuntimeError
    clock.spend(1)
    assert meter.step()["step_split"]["forward"] == 0.0


def test_unknown_phase_is_refused():
    with pytest.raises(AssertionError), build_meter(Clock()).phase("forwrad"):
        pass


def test_wall_clock_agrees_with_the_records():
    # tokens over wall time, all steps after the first, evaluation excluded, within 2 per cent
    meter = StepMeter(4096, 1, None, CPU)
    records = []
    for step in range(6):
        if step == 1:
            began, paused = time.perf_counter(), 0.0
        for _ in range(4):
            with meter.phase("forward"):
                time.sleep(0.004)
        if step == 3:
            with meter.pause():
                before = time.perf_counter()
                time.sleep(0.05)
                paused = time.perf_counter() - before
        records.append(meter.step())
    wall = time.perf_counter() - began - paused
    seconds = sum(record["step_seconds"] for record in records[1:])
    assert seconds == pytest.approx(wall, rel=0.02)
    assert sum(r["tokens_per_second"] * r["step_seconds"] for r in records[1:]) == pytest.approx(5 * 4096)


class Stream:
    """A device that works through what is put on it while the host goes on, and the events on it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free_at = 0.0
        self.built = 0

    def work(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.clock.now) + seconds

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.free_at)

    def build_event(self) -> "Event":
        self.built += 1
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def record(self) -> None:
        self.at = max(self.stream.free_at, self.stream.clock.now)

    def query(self) -> bool:
        return self.at <= self.stream.clock.now

    def elapsed_time(self, other: "Event") -> float:
        assert self.query() and other.query(), "read before the device was there"
        return (other.at - self.at) * 1000


@pytest.fixture
def device(monkeypatch):
    """A meter whose device is the made-up stream; the host waits for it only where a step reads its loss."""
    clock = Clock()
    stream = Stream(clock)
    meter = build_meter(clock)
    meter._timer = meter_module._EventTimer(stream.build_event)
    monkeypatch.setattr(StepMeter, "_wait", lambda self: stream.wait())
    return meter, clock, stream


def run_device_step(meter, clock, stream):
    with meter.phase("data"):
        clock.spend(0.5)
    with meter.phase("forward"):
        stream.work(1)
    with meter.phase("backward"):
        stream.work(2)
    with meter.phase("reduce"):
        stream.work(0.25)
        # the vote reads the norm
        stream.wait()
    with meter.phase("optimizer"):
        stream.work(0.75)
    return meter.step()


def test_events_give_the_device_its_time(device):
    meter, clock, stream = device
    first = run_device_step(meter, clock, stream)
    assert first["step_split"]["forward"] == 1.0
    assert first["step_split"]["optimizer"] == 0.0
    second = run_device_step(meter, clock, stream)
    # the optimizer of the first step ran while the host fetched the data of the second: 0.5 of the 0.75 s are hidden
    assert second["step_seconds"] == pytest.approx(0.75 + 1 + 2 + 0.25)
    split = second["step_split"]
    assert split["optimizer"] == pytest.approx(0.75)
    assert split["data"] == pytest.approx(0.0)
    assert (split["forward"], split["backward"], split["reduce"]) == pytest.approx((1.0, 2.0, 0.25))
    assert split["other"] == pytest.approx(0.0)


def test_events_are_used_again(device):
    meter, clock, stream = device
    for _ in range(3):
        run_device_step(meter, clock, stream)
    built = stream.built
    for _ in range(5):
        run_device_step(meter, clock, stream)
    assert stream.built == built


def test_pause_on_a_device_waits_for_what_is_under_way(device):
    meter, clock, stream = device
    run_device_step(meter, clock, stream)
    with meter.pause(), meter.phase("forward"):
        stream.work(30)
    figures = run_device_step(meter, clock, stream)
    assert figures["paused_seconds"] == 30.0
    assert figures["step_split"]["forward"] == 1.0
    assert figures["step_split"]["optimizer"] == 0.75
    assert figures["step_seconds"] == pytest.approx(0.75 + 0.5 + 1 + 2 + 0.25)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_on_a_real_device():
    device = torch.device("cuda")
    meter = StepMeter(1, 1, None, device)
    matrix = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        with meter.phase("forward"):
            for _ in range(20):
                matrix = matrix @ matrix / 64
        with meter.phase("reduce"):
            matrix.sum().item()
        figures = meter.step()
    assert figures["step_split"]["forward"] > 0.5 * figures["step_seconds"]
    assert set(figures["step_split"]) == {*PHASES, "other"}
