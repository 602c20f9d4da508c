"""The options of Gefen, apart from AdamW's own numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memopt import codebook, partition


@dataclass(frozen=True)
class GefenOptions:
    """What changes the maths or the memory of Gefen, beside AdamW's own numbers."""

    partition: str = "row"
    """How many consecutive entries of a row share a second moment: ``row`` (all), ``fixed`` (``block``), or found from
    the first gradient by the ``paper``'s rule or by that of later releases, ``peaks`` (``memopt.partition``)."""
    block: int | None = None
    """``partition=fixed``: entries of a block; must divide every matrix's row."""
    second_moment: str = "factored"
    """``block``: one value a block (the paper). ``factored``: times a factor of the column."""
    momentum: str = "8bit"
    """``8bit`` codes with a scale per block, or ``fp32``."""
    levels: int = 256
    """Levels of the codebook: a power of two up to 256."""
    zero_level: bool = True
    """Move the level nearest to 0 onto 0, so that a momentum of 0 stays 0. The paper does not."""
    update: str = "exact"
    """Whether weights move by the momentum before it is coded (``exact``) or by what is kept (``quantised``)."""
    max_update: float | None = None
    """Cut entries of the update, before the learning rate, to this absolute value; None cuts nothing."""
    refresh: int = 0
    """Steps after which codebook and periods are found anew from the gradient of the time; 0: never."""
    drift_interval: int = 100
    """Steps after which the share of matrices whose period would be found again is measured; 0: never."""

    def __post_init__(self) -> None:
        for key, allowed in (
            ("partition", partition.RULES),
            ("second_moment", ("block", "factored")),
            ("momentum", ("8bit", "fp32")),
            ("update", ("exact", "quantised")),
        ):
            if (value := getattr(self, key)) not in allowed:
                raise ValueError(f"{key}={value!r} is not one of {', '.join(allowed)}. Set {key} to one of these.")
        codebook.check_levels(self.levels)
        if self.block is not None and self.partition != "fixed":
            raise ValueError(f"block={self.block} is read by partition='fixed' only. Set that, or no block.")
        if self.block is not None and not isinstance(self.block, int):
            raise ValueError(f"block={self.block!r} must be a whole number. Set for example 64.")
        if self.max_update is not None and not (isinstance(self.max_update, int | float) and self.max_update > 0):
            raise ValueError(f"max_update={self.max_update} must be above 0. Set None to cut nothing.")
        for key in ("refresh", "drift_interval"):
            if not isinstance(steps := getattr(self, key), int) or steps < 0:
                raise ValueError(f"{key}={steps} must be a whole number >= 0. Set 0 for never.")


def check_numbers(group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a parameter group has a number that cannot work, or an option of the whole optimizer."""
    own = GefenOptions.__dataclass_fields__.keys() & group.keys()
    if own:
        raise ValueError(f"{sorted(own)[0]} is an option of the whole optimizer, not of a group. Pass it to Gefen.")
    lr, eps, decay, betas = float(group["lr"]), group["eps"], group["weight_decay"], group["betas"]
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr={lr} must be a number >= 0. Set for example 1e-3.")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps={eps} must be a number >= 0. Set for example 1e-8.")
    if not (math.isfinite(decay) and decay >= 0):
        raise ValueError(f"weight_decay={decay} must be a number >= 0. Set for example 0.1.")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={tuple(betas)} must be two numbers in [0, 1). Set for example (0.9, 0.95).")
