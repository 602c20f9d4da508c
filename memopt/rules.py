"""The update rules, made for parameter groups by name."""

from collections.abc import Sequence
from typing import Any

import torch

from memopt.sharded import ShardedOptimizer, StateOptimizer

RULES = ("adamw", "gefen", "sgd")


def build_rule(rule: str, groups: Sequence[dict[str, Any]], **options: Any) -> StateOptimizer:
    """The update rule ``rule`` with its state sharded over all data-parallel ranks.

    Args:
        rule: one of ``RULES``.
        groups: ``{"named_parameters": {name: parameter}, "weight_decay": ..., ...}``.
        options: of the rule: ``lr``; of adamw ``betas`` and ``eps``, of sgd ``momentum``, of gefen what
            ``memopt.gefen.Gefen`` takes.

    Raises:
        ValueError: gefen cannot take an option or a parameter.
    """
    groups = [group for group in groups if group["named_parameters"]]
    if rule == "adamw":
        moments = ("exp_avg", "exp_avg_sq")
        options = {**options, "betas": tuple(options["betas"]), "fused": True}
        return ShardedOptimizer(groups, torch.optim.AdamW, state_names=moments, counts_steps=True, options=options)
    if rule == "sgd":
        buffers = ("momentum_buffer",) if options["momentum"] else ()
        return ShardedOptimizer(groups, torch.optim.SGD, state_names=buffers, counts_steps=False, options=options)
    assert rule == "gefen", rule
    # imports numba, which other rules do without
    from memopt.gefen import Gefen

    named = []
    for group in groups:
        rest = {key: value for key, value in group.items() if key != "named_parameters"}
        named.append({"params": list(group["named_parameters"].items()), **rest})
    return Gefen(named, **options)
