"""``memory.png``: bytes by owner over one training step, stacked, so that it shows who holds what at the peak."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

COLORS = {
    "parameters": "tab:blue",
    "gradients": "tab:orange",
    "optimizer_state": "tab:green",
    "activations": "tab:red",
    "loss": "tab:purple",
    "communication": "tab:brown",
    "other": "tab:gray",
}
GIB = 2**30
MIB = 2**20


class Moment(Protocol):
    """A point of the timeline."""

    @property
    def phase(self) -> str | None:
        """The phase it lies in."""

    @property
    def owners(self) -> dict[str, int]:
        """Bytes by owner."""


def plot_memory(path: Path, timeline: Sequence[Moment], title: str, budget_bytes: float | None = None) -> None:
    """Draw ``timeline`` as ``path``; a line marks ``budget_bytes``."""
    # imported here: half a second, and few runs' few moments need it; no pyplot, which keeps global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    highest = max((sum(moment.owners.values()) for moment in timeline), default=0)
    unit, name = (GIB, "GiB") if max(highest, budget_bytes or 0) >= 2 * GIB else (MIB, "MiB")
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    xs = range(len(timeline))
    heights = {owner: [moment.owners[owner] / unit for moment in timeline] for owner in COLORS}
    axes.stackplot(xs, heights.values(), colors=COLORS.values(), labels=[_label(owner) for owner in COLORS])
    if budget_bytes is not None:
        axes.axhline(budget_bytes / unit, color="black", linestyle="--", linewidth=1, label="budget")
    _draw_phases(axes, timeline)
    axes.set_xlim(0, max(1, len(timeline) - 1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("operations of one step, in their order")
    axes.set_ylabel(name)
    axes.set_title(title, fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    figure.savefig(path)


def _draw_phases(axes: Any, timeline: Sequence[Moment]) -> None:
    """A thin line and a name where a phase begins."""
    before: str | None = None
    for place, moment in enumerate(timeline):
        if moment.phase != before and moment.phase is not None:
            axes.axvline(place, color="black", linewidth=0.5, alpha=0.4)
            axes.annotate(
                moment.phase, (place, 1.0), xycoords=("data", "axes fraction"), rotation=90, fontsize=7,
                va="top", ha="left", xytext=(2, -3), textcoords="offset points",
            )  # fmt: skip
        before = moment.phase


def _label(owner: str) -> str:
    return owner.replace("_", " ")
