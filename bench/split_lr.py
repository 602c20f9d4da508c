"""AdamW at another learning rate in the blocks' matrices than in embedding, head and norms.

    python -m bench.split_lr 0.5 <overrides of train.py>

trains as ``train.py optimizer=adamw`` does, with the given factor on the learning rate of every matrix in a block.
RSO has such a factor (``optimizer.lr_scale``), and what it gains is not RSO's:
``bench.rso_quality`` runs AdamW with it too.
"""

import sys
from collections.abc import Mapping

from conf.command import read_command_line

if __name__ == "__main__":
    CONFIG = read_command_line("python -m bench.split_lr FACTOR", sys.argv[2:], 0, 1)

from typing import Any

from torch import Tensor

import train
from conf.optimizers import OptimizerConfig
from memopt.build import decayed_names
from memopt.rules import build_rule
from memopt.sharded import ShardedOptimizer


def build_split(config: Any, named: Mapping[str, Tensor], factor: float) -> ShardedOptimizer:
    """AdamW over ``named``, canonical name -> parameter; ``factor`` is on matrices of ``layers.*``."""
    decayed = decayed_names(config.decay, named)
    scaled = {name for name, tensor in named.items() if name.startswith("layers.") and tensor.ndim == 2}
    parts = [{name: named[name] for name in named if (name in decayed, name in scaled) == kind} for kind in KINDS]
    decays = [config.weight_decay if kind[0] else 0.0 for kind in KINDS]
    groups = [{"named_parameters": part, "weight_decay": decay} for part, decay in zip(parts, decays, strict=True)]
    optimizer = build_rule("adamw", groups, lr=config.lr, betas=config.betas, eps=config.eps)
    assert isinstance(optimizer, ShardedOptimizer)
    factors = [factor if kind[1] else 1.0 for kind, part in zip(KINDS, parts, strict=True) if part]

    def set_lr(lr: float) -> None:
        for group, own in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = lr * own

    optimizer.set_lr = set_lr  # type: ignore[method-assign]
    return optimizer


# whether a group is decayed, and whether its rate is scaled
KINDS = ((True, True), (True, False), (False, True), (False, False))


def main() -> int:
    """Train ``CONFIG`` so; returns the exit status."""
    factor = float(sys.argv[1])

    def build(config: OptimizerConfig, named: Mapping[str, Tensor], model: Any = None) -> ShardedOptimizer:
        return build_split(config, {name: tensor for name, tensor in named.items() if tensor.requires_grad}, factor)

    train.build_optimizer = build
    return train.main(CONFIG)


if __name__ == "__main__":
    sys.exit(main())
