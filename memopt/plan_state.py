"""What an optimizer holds and takes, in bytes, without the tensors: it is built on a model on the meta device.

The bytes are those that the optimizers state of themselves (``state_bytes``, ``transient_bytes``, ``periodic_bytes``);
only what would compute or depends on the device is left out or redirected here: no projection is drawn, and Gefen's
workspaces are those of the kernels of the target.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

import kernels
from conf.optimizers import GefenConfig, OptimizerConfig
from memopt import codebook, gefen_memory, layout, rso, subspace
from memopt.build import build_optimizer
from memopt.sharded import StateOptimizer


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of one rank."""

    state: int
    """All state, projections included."""
    projections: int
    """The part of ``state`` that is projections, which a trace of the model has already."""
    is_final: bool
    """Whether ``state`` is exact; an upper bound where it waits for the first gradient."""
    transient: int
    """Allocated and freed by every step: an upper bound."""
    periodic: int
    """The same for the steps that do more."""

    @property
    def beside_model(self) -> int:
        """State that a trace of the model does not have."""
        return self.state - self.projections


def optimizer_bytes(
    config: OptimizerConfig, model: nn.Module, named_parameters: dict[str, nn.Parameter], device_type: str
) -> OptimizerBytes:
    """Bytes of the optimizer of ``config`` on the rank whose shards ``model``, on the meta device, has.

    Raises:
        ConfigError: the rule cannot take a parameter or option.
    """
    backend = config.backend if isinstance(config, GefenConfig) else "auto"
    if isinstance(config, GefenConfig):
        # the one that was asked for does not run on the meta device
        config = dataclasses.replace(config, backend="auto")
    with _nothing_computed():
        optimizer = build_optimizer(config, named_parameters, model)
        state = optimizer.state_bytes()
    groups = subspace.groups(model)
    projections = sum(group.projection.nbytes() for group in groups)
    rules: list[StateOptimizer] = getattr(optimizer, "_rules", [optimizer])
    chosen = kernels.choose(backend, torch.device(device_type), {torch.float32})
    steps = sum(_bytes(layer.subspace) for group in groups for layer in group.layers.values())
    with _nothing_computed():
        transient, periodic = (steps + max(_taken(rule, chosen, often) for rule in rules) for often in (True, False))
    if groups:
        # at a new subspace: the old projections are kept while new ones are drawn, on the CPU in fp64 three times over
        drawing = max(24 * group.projection.values.numel() for group in groups) if device_type == "cpu" else 0
        periodic = max(periodic, projections + drawing)
    return OptimizerBytes(state, projections, optimizer.state_is_final, transient, periodic)


def _taken(rule: StateOptimizer, backend: ModuleType, often: bool) -> int:
    """Bytes that a step of ``rule`` takes: of every one if ``often``, else of the largest."""
    entries = getattr(rule, "_held", None)
    if entries is None:
        return rule.transient_bytes() if often else rule.periodic_bytes()
    if often:
        return gefen_memory.transient_bytes(entries(), lambda entry: backend)
    options: Any = rule.options  # type: ignore[attr-defined]
    return gefen_memory.periodic_bytes(entries(), lambda entry: backend, options, rule.state_is_final)


def _bytes(parameter: nn.Parameter) -> int:
    rows = layout.local_rows(parameter.detach())
    return rows.numel() * rows.element_size()


@contextmanager
def _nothing_computed() -> Iterator[None]:
    """Projections are not drawn and no kernel is compiled: seconds or minutes for values that nobody reads."""
    draw_all, prepare = rso.draw_all, codebook.prepare  # type: ignore[attr-defined]
    rso.draw_all = lambda projections, seed, index: None  # type: ignore[attr-defined]
    codebook.prepare = lambda: None
    try:
        yield
    finally:
        rso.draw_all, codebook.prepare = draw_all, prepare  # type: ignore[attr-defined]
