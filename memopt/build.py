"""The optimizer of a run, its parameter groups, and its learning rate by step."""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conf.checks import ConfigError
from conf.optimizers import AdamWConfig, GefenConfig, OptimizerConfig, SGDConfig
from conf.schema import ScheduleConfig
from memopt.sharded import ShardedOptimizer, StateOptimizer


def build_optimizer(config: OptimizerConfig, named_parameters: Mapping[str, Tensor]) -> StateOptimizer:
    """The optimizer that ``config`` names over canonical name -> parameter; frozen parameters are left out.

    Raises ``ConfigError`` when a pattern of ``optimizer.decay`` matches no parameter, or the rule cannot take one.
    """
    trainable = {name: tensor for name, tensor in named_parameters.items() if tensor.requires_grad}
    decayed = decayed_names(config.decay, trainable)
    groups: list[dict[str, Any]] = [
        {
            "named_parameters": {name: trainable[name] for name in trainable if (name in decayed) == chosen},
            "weight_decay": config.weight_decay if chosen else 0.0,
        }
        for chosen in (True, False)
    ]
    groups = [group for group in groups if group["named_parameters"]]
    match config:
        case AdamWConfig():
            options = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps, "fused": True}
            moments = ("exp_avg", "exp_avg_sq")
            return ShardedOptimizer(groups, torch.optim.AdamW, state_names=moments, counts_steps=True, options=options)
        case SGDConfig():
            options = {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov}
            buffers = ("momentum_buffer",) if config.momentum else ()
            return ShardedOptimizer(groups, torch.optim.SGD, state_names=buffers, counts_steps=False, options=options)
        case GefenConfig():
            # imports numba, which other rules do without
            from memopt.gefen import Gefen

            own = {field.name for field in dataclasses.fields(config)} - {"decay", "name"}
            named = [
                {"params": list(group["named_parameters"].items()), "weight_decay": group["weight_decay"]}
                for group in groups
            ]
            try:
                return Gefen(named, **{key: getattr(config, key) for key in own})
            except ValueError as error:
                raise ConfigError(f"optimizer: {error}") from None
    raise AssertionError(f"no optimizer is built for {type(config).__name__}")


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
