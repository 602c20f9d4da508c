"""The options of Gefen, apart from AdamW's own numbers."""

from dataclasses import dataclass

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
        if self.max_update is not None and not self.max_update > 0:
            raise ValueError(f"max_update={self.max_update} must be above 0. Set None to cut nothing.")
        for key in ("refresh", "drift_interval"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}={getattr(self, key)} must be >= 0. Set 0 for never.")
