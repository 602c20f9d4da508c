"""What a training step of RSO costs beside AdamW's at the same microbatch: ``python -m bench.rso_step``.

Llama-3 blocks of width 512 and 1024 with a small vocabulary, sequences of 512 tokens, r = in / 4, fp32. Each contestant
is a model of its own with the same seed and the trainer's own optimizer: AdamW (torch's fused kernel), RSO with AdamW
in haar subspaces, and in coordinate ones. A step is forward, backward and optimizer, whose time includes the merge and
dropping the gradients; a new subspace is drawn only once in ``interval`` steps and is timed apart. Contestants run in
turn, and a ratio is the median over rounds of two times of one round. Each setting has a process of its own, with as
many threads as cores that it is bound to. Beside the steps: what Y P and the merges of a whole step take alone.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.machine import write_result
from conf.compose import load_config
from memopt import projection, subspace
from memopt.build import build_optimizer, prepare_model
from memopt.sharded import StateOptimizer
from models.build import build_model
from models.decoder import LanguageModel
from models.init import init_weights
from models.names import named_parameters

WARM_UP = 2
SEQ_LEN, VOCABULARY = 512, 1024
ADAMW, HAAR, COORDINATE = "AdamW, fused", "RSO, haar", "RSO, coordinate"
OPTIMIZERS = {
    ADAMW: ["optimizer=adamw"],
    HAAR: ["optimizer=rso", "optimizer.projection=haar"],
    COORDINATE: ["optimizer=rso", "optimizer.projection=coordinate"],
}
PARTS = ("forward", "backward", "optimizer")
# wanted at width 1024: time of a step over AdamW's
TARGETS = {HAAR: 1.0, COORDINATE: 0.9}


@dataclass(frozen=True)
class Setting:
    """What is run: blocks of a model, tokens a step."""

    model: str
    layers: int
    sequences: int
    threads: int
    rounds: int
    rank: int | None = None
    """r of every layer; None: a quarter of each one's input."""


@dataclass
class Contestant:
    """A model and its optimizer."""

    model: LanguageModel
    optimizer: StateOptimizer

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Seconds of each part of one step."""
        marks = [time.perf_counter()]
        loss = self.model(tokens, labels) / labels.numel()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        return {part: marks[k + 1] - marks[k] for k, part in enumerate(PARTS)}


def build_contestant(setting: Setting, overrides: list[str]) -> Contestant:
    """Blocks of the model's width with initial weights, and the optimizer with its state."""
    small = [f"model.vocab_size={VOCABULARY}", f"data.vocab_size={VOCABULARY}", f"model.layers={setting.layers}"]
    # no change of subspace among the timed steps
    never = ["optimizer.interval=1000000"] if "optimizer=rso" in overrides else []
    rank = [f"optimizer.rank={setting.rank}"] if "optimizer=rso" in overrides and setting.rank else []
    config = load_config([f"model={setting.model}", *small, *overrides, *never, *rank])
    model = build_model(config.model, SEQ_LEN, "cpu")
    prepare_model(config.optimizer, model, torch.float32)
    init_weights(model, 0, torch.device("cpu"))
    optimizer = build_optimizer(config.optimizer, named_parameters(model), model)
    optimizer.init_state()
    return Contestant(model, optimizer)


def measure(setting: Setting) -> dict[str, Any]:
    """Seconds of the parts of a step of each contestant, and of Y P and merges alone."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: setting.threads])
    torch.set_num_threads(setting.threads)
    contestants = {name: build_contestant(setting, overrides) for name, overrides in OPTIMIZERS.items()}
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(VOCABULARY, (setting.sequences, SEQ_LEN + 1), generator=generator)
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for _ in range(WARM_UP + setting.rounds):
        for name, contestant in contestants.items():
            rounds[name].append(contestant.step(tokens, labels))
    rounds = {name: every[WARM_UP:] for name, every in rounds.items()}
    alone: dict[str, dict[str, float]] = {}
    for name in (HAAR, COORDINATE):
        alone[name] = time_alone(contestants[name].model, tokens.shape, setting.rounds)
    return {"steps": summarise(rounds), "alone": alone}


def summarise(rounds: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Contestant -> median seconds of each part and of the step, and their ratios to AdamW's of the same rounds."""
    whole = {name: [{**parts, "step": sum(parts.values())} for parts in every] for name, every in rounds.items()}
    found: dict[str, dict[str, float]] = {}
    for name, every in whole.items():
        found[name] = {}
        for part in (*PARTS, "step"):
            pairs = [(own[part], base[part]) for own, base in zip(every, whole[ADAMW], strict=True)]
            found[name][part] = statistics.median(own for own, _ in pairs)
            found[name][f"{part}_over_adamw"] = statistics.median(own / base for own, base in pairs)
    return found


@torch.no_grad()
def time_alone(model: LanguageModel, shape: torch.Size, repeats: int) -> dict[str, float]:
    """Seconds of all Y P of one forward pass, of all merges of one step, and of drawing all P, each by itself."""
    groups = subspace.groups(model)
    inputs = {group.projection.width: torch.randn(*shape, group.projection.width) for group in groups}
    layers = [(group.projection, layer) for group in groups for layer in group.layers.values()]
    steps = [1e-6 * torch.randn(layer.out_features, p.rank) for p, layer in layers]

    def project() -> None:
        for group in groups:
            p = group.projection
            projection.project(inputs[p.width], p.values, p.scale)

    def merge() -> None:
        for (p, layer), step in zip(layers, steps, strict=True):
            p.merge_(layer.weight, step, 1.0 - 1e-4)

    def draw() -> None:
        projection.draw_all([(group.name, group.projection) for group in groups], 0, 1)

    seconds = {name: _median_seconds(run, repeats) for name, run in (("project", project), ("merge", merge))}
    return {**seconds, "draw": _median_seconds(draw, 1)}


def _median_seconds(run: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def tabulate(setting: Setting, found: dict[str, Any]) -> Table:
    """Milliseconds and ratios of one setting."""
    threads = f"{setting.threads} thread{'s' * (setting.threads > 1)}"
    rank = "in / 4" if setting.rank is None else str(setting.rank)
    title = f"{setting.layers} blocks of {setting.model}, {setting.sequences} x {SEQ_LEN} tokens, r {rank}, {threads}"
    columns = [*PARTS, "step", "Y P alone", "merges alone", "new subspace"]
    table = Table("ms (over AdamW)", *columns, title=title, title_justify="left")
    for name, row in found["steps"].items():
        cells = [f"{row[part] * 1e3:.0f} ({row[f'{part}_over_adamw']:.2f})" for part in (*PARTS, "step")]
        alone = found["alone"].get(name)
        table.add_row(
            name, *cells, *[f"{alone[key] * 1e3:.1f}" if alone else "" for key in ("project", "merge", "draw")]
        )
    return table


def main() -> None:
    """Print a table for each setting, write ``bench/results/rso_step.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", default=["llama3_60m", "llama3_350m"], help="whose blocks: 512 and 1024")
    parser.add_argument("--layers", type=int, default=2, help="blocks")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 4], help=f"of {SEQ_LEN} tokens, of a step")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="numbers of threads")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds")
    parser.add_argument("--rank", type=int, help="r of every layer (default: a quarter of each one's input)")
    arguments = parser.parse_args()
    console = Console(width=130)
    rows = []
    for model in arguments.models:
        for sequences in arguments.sequences:
            for threads in arguments.threads:
                setting = Setting(model, arguments.layers, sequences, threads, arguments.rounds, arguments.rank)
                # a pool starts its threads once, and they keep the cores that they are bound to
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    found = pool.apply(measure, (setting,))
                console.print(tabulate(setting, found))
                rows.append({**vars(setting), "tokens": sequences * SEQ_LEN, **found})
    content = {"seq_len": SEQ_LEN, "vocabulary": VOCABULARY, "settings": rows, "targets": {"step_over_adamw": TARGETS}}
    console.print(f"written to {write_result('rso_step', content)}")


if __name__ == "__main__":
    main()
