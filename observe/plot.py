"""``loss.png``: training loss, raw and smoothed, held-out loss and learning rate over the steps of a run."""

import math
from pathlib import Path

from observe.sinks import Record
from observe.sinks.jsonl import read_lines

# a picture of 1000 pixels shows no more than this
MAX_POINTS = 4000


def plot_loss(folder: Path) -> Path | None:
    """Draw ``loss.png`` from the ``metrics.jsonl`` of a run folder; ``None`` where that holds no loss yet."""
    records = read_lines(folder / "metrics.jsonl")
    train = [(record["step"], record["loss"]) for record in records if record.get("loss") is not None]
    held_out = [(record["step"], record["val_loss"]) for record in records if record.get("val_loss") is not None]
    if not train and not held_out:
        return None
    # imported here: half a second, and only the end of a run needs it; no pyplot, which keeps global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_rate(axes.twinx(), records)
    if train:
        steps, losses = zip(*train, strict=True)
        smooth = smoothed(list(losses))
        kept = slice(None, None, math.ceil(len(steps) / MAX_POINTS))
        axes.plot(steps[kept], losses[kept], color="tab:blue", alpha=0.3, linewidth=0.8, label="train")
        axes.plot(steps[kept], smooth[kept], color="tab:blue", linewidth=1.8, label="train, smoothed")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), color="tab:red", marker="o", markersize=5, linewidth=1.2, label="held-out"
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    _limit(axes, [loss for _, loss in train] + [loss for _, loss in held_out])
    axes.grid(alpha=0.3)
    axes.set_title(_title(train, held_out), fontsize=11)
    axes.legend(loc="upper right")
    # the second axis is drawn on top otherwise
    axes.set_zorder(1)
    axes.patch.set_visible(False)
    path = folder / "loss.png"
    temporary = folder / ".loss.png.tmp"
    figure.savefig(temporary, format="png")
    temporary.replace(path)
    return path


def smoothed(values: list[float]) -> list[float]:
    """Exponential mean over about a fiftieth of the run, without the pull of a starting value."""
    keep = 1 - 1 / max(len(values) / 50, 1)
    result, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        result.append(mean / weight)
    return result


def _draw_rate(axes, records: list[Record]) -> None:
    points = [(record["step"], record["lr"]) for record in records if record.get("lr") is not None]
    if not points:
        axes.set_visible(False)
        return
    points = points[:: math.ceil(len(points) / MAX_POINTS)]
    axes.plot(*zip(*points, strict=True), color="tab:gray", linewidth=1.0, linestyle="--")
    axes.set_ylabel("learning rate (dashed)", color="tab:gray")
    axes.tick_params(axis="y", colors="tab:gray")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def _limit(axes, losses: list[float]) -> None:
    """A spike must not flatten the rest: the top of the picture is the larger of the start and the 99th percentile."""
    ordered = sorted(losses)
    top = max(losses[0], ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)])
    low = ordered[0]
    margin = 0.05 * (top - low) or 0.05 * abs(top) or 1.0
    axes.set_ylim(low - margin, top + margin)


def _title(train: list, held_out: list) -> str:
    parts = [f"step {max(points[-1][0] for points in (train, held_out) if points)}"]
    if train:
        parts.append(f"train loss {train[-1][1]:.4f}")
    if held_out:
        parts.append(f"held-out loss {held_out[-1][1]:.4f}")
    return ", ".join(parts)
