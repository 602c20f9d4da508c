"""loss.png: the points that are drawn, holes where a loss is unknown, and no import before it is needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from observe import plot

ROOT = Path(__file__).parents[2]


def write_metrics(folder, records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def drawn(monkeypatch):
    """Every curve that is drawn: label -> points."""
    from matplotlib.axes import Axes

    curves = {}
    original = Axes.plot

    def remember(self, x, y, **options):
        curves[options.get("label", "lr")] = list(zip(x, y, strict=True))
        return original(self, x, y, **options)

    monkeypatch.setattr(Axes, "plot", remember)
    return curves


def test_curves_of_a_run(tmp_path, drawn):
    write_metrics(
        tmp_path,
        [
            {"step": 1, "loss": 9.0, "lr": 0.1},
            {"step": 2, "loss": None, "lr": 0.2, "nonfinite": ["loss"]},
            {"step": 3, "loss": 7.0, "lr": 0.3, "val_loss": 8.0},
        ],
    )
    path = plot.plot_loss(tmp_path)
    assert path == tmp_path / "loss.png" and path.read_bytes()[1:4] == b"PNG"
    assert drawn["train"] == [(1, 9.0), (3, 7.0)]
    assert drawn["held-out"] == [(3, 8.0)]
    assert drawn["lr"] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert [step for step, _ in drawn["train, smoothed"]] == [1, 3]


def test_a_long_run_is_thinned(tmp_path, drawn):
    write_metrics(tmp_path, [{"step": step, "loss": 1.0, "lr": 0.1} for step in range(1, 9002)])
    plot.plot_loss(tmp_path)
    assert 2000 < len(drawn["train"]) <= plot.MAX_POINTS
    assert len(drawn["lr"]) <= plot.MAX_POINTS


@pytest.mark.parametrize(
    "records",
    [[{"step": 1, "loss": 2.0}], [{"step": 0, "val_loss": 2.0}], [{"step": 1, "loss": 0.0}, {"step": 2, "loss": 0.0}]],
)
def test_short_runs_have_a_picture_too(tmp_path, records):
    write_metrics(tmp_path, records)
    assert plot.plot_loss(tmp_path).exists()


def test_nothing_to_draw(tmp_path):
    assert plot.plot_loss(tmp_path) is None
    write_metrics(tmp_path, [{"step": 1, "loss": None}])
    assert plot.plot_loss(tmp_path) is None
    assert not (tmp_path / "loss.png").exists()


def test_smoothing_has_no_pull_of_a_starting_value():
    assert plot.smoothed([3.0] * 200) == pytest.approx([3.0] * 200)
    noisy = [5.0 + (-1) ** step for step in range(1000)]
    assert all(abs(value - 5.0) < 0.2 for value in plot.smoothed(noisy)[100:])
    assert plot.smoothed([1.0, 2.0]) == [1.0, 2.0]


def test_a_spike_does_not_flatten_the_rest():
    class Axes:
        def set_ylim(self, low, high):
            self.limits = (low, high)

    axes = Axes()
    plot._limit(axes, [4.0] + [3.0] * 300 + [500.0] + [2.0] * 300)
    assert axes.limits == pytest.approx((1.9, 4.1))


def test_watching_a_run_does_not_import_what_it_does_not_need():
    names = "('matplotlib', 'wandb', 'tensorboard')"
    code = f"import observe.observer, sys; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
