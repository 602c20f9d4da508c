"""The optimizer of a run, its parameter groups, and its learning rate by step."""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from conf.checks import ConfigError
from conf.optimizers import GefenConfig, OptimizerConfig, RSOConfig
from conf.schema import ScheduleConfig
from memopt import subspace
from memopt.rules import build_rule
from memopt.sharded import StateOptimizer


def prepare_model(config: OptimizerConfig, model: nn.Module, compute_dtype: torch.dtype) -> None:
    """Give a model, not yet sharded or wrapped, the layers that the optimizer needs. Raises ``ConfigError``."""
    if isinstance(config, RSOConfig):
        try:
            subspace.convert(
                model, rank=config.rank, projection=config.projection, layers=config.layers, dtype=compute_dtype
            )
        except ValueError as error:
            raise ConfigError(f"optimizer: {error}") from None


def build_optimizer(
    config: OptimizerConfig, named_parameters: Mapping[str, Tensor], model: nn.Module | None = None
) -> StateOptimizer:
    """The optimizer that ``config`` names over canonical name -> parameter; frozen parameters are left out.

    ``model`` has the parameters; rso needs it. Raises ``ConfigError`` when a pattern of ``optimizer.decay`` matches no
    parameter, or the rule cannot take one.
    """
    if isinstance(config, RSOConfig):
        assert model is not None
        return _build_rso(config, named_parameters, model)
    trainable = {name: tensor for name, tensor in named_parameters.items() if tensor.requires_grad}
    decayed = decayed_names(config.decay, trainable)
    groups = [
        {
            "named_parameters": {name: trainable[name] for name in trainable if (name in decayed) == chosen},
            "weight_decay": config.weight_decay if chosen else 0.0,
        }
        for chosen in (True, False)
    ]
    own = {field.name for field in dataclasses.fields(config)} - {"decay", "name"}
    if not isinstance(config, GefenConfig):
        own -= {"weight_decay"}
    try:
        return build_rule(config.name, groups, **{key: getattr(config, key) for key in own})
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from None


def _build_rso(config: RSOConfig, named_parameters: Mapping[str, Tensor], model: nn.Module) -> StateOptimizer:
    from memopt.rso import RSO

    projected = {f"{name}.weight" for group in subspace.groups(model) for name in group.layers}
    weights = {
        name: tensor
        for name, tensor in named_parameters.items()
        if (tensor.requires_grad or name in projected) and not subspace.is_subspace(name)
    }
    adam = {"betas": config.betas, "eps": config.eps}
    try:
        return RSO(
            model,
            config.lr,
            config.weight_decay,
            inner=config.inner,
            dense=config.dense,
            interval=config.interval,
            stall=config.stall,
            proximal=config.proximal,
            probed=config.probed,
            reset=config.reset,
            lr_scale=config.lr_scale,
            warmup=config.warmup,
            seed=config.seed,
            named_parameters=named_parameters,
            decayed=decayed_names(config.decay, weights),
            options={"adamw": adam, "gefen": adam, "sgd": {"momentum": config.momentum}},
        )
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from None


def decayed_names(patterns: Sequence[str], named_parameters: Mapping[str, Tensor]) -> set[str]:
    """Names that weight decay applies to: every matrix, or what ``patterns`` match."""
    if not patterns:
        return {name for name, tensor in named_parameters.items() if tensor.ndim >= 2}
    names: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(named_parameters, pattern)
        if not matched:
            raise ConfigError(
                f"optimizer.decay has the pattern {pattern!r}, which matches no parameter. "
                f"Names look like {', '.join(list(named_parameters)[:3])}; use for example 'layers.*.weight'."
            )
        names.update(matched)
    return names


def lr_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """Factor of the peak learning rate at ``step`` (from 1) of ``steps``: a function of these alone."""
    if step <= config.warmup:
        return step / config.warmup
    floor = config.min_ratio
    if config.kind == "constant":
        return 1.0
    if config.kind == "wsd":
        decay = config.decay_share * steps
        progress = (step - (steps - decay)) / decay if decay else 0.0
        return 1.0 - (1.0 - floor) * min(1.0, max(0.0, progress))
    progress = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    if config.kind == "linear":
        return 1.0 - (1.0 - floor) * progress
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
