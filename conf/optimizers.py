"""The update rules of a run: one dataclass each, with the keys that the rule reads."""

from dataclasses import dataclass, field

from conf.checks import ConfigError, above, at_least, choice


@dataclass
class OptimizerConfig:
    """The update rule. Each rule adds its own keys, so that a key it does not read is an error."""

    name: str = "???"
    """The rule: ``adamw``, ``sgd``, ``gefen`` or ``rso``. Chosen with ``optimizer=adamw``."""
    lr: float = 1e-3
    """Peak learning rate; ``schedule`` scales it."""
    weight_decay: float = 0.0
    """Decay of the parameters that ``decay`` selects; 0 on all others."""
    decay: list[str] = field(default_factory=list)
    """Shell patterns of parameter names that are decayed, e.g. ``['layers.*.weight']``. Empty: every matrix. A
    pattern that matches no parameter is an error."""

    def __post_init__(self) -> None:
        at_least("optimizer.lr", self.lr, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW (arXiv 1711.05101): decoupled weight decay, torch's fused kernel."""

    name: str = "adamw"
    """The rule."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("optimizer.name", self.name, ("adamw",))
        above("optimizer.eps", self.eps, 0)
        _check_betas(self.betas)


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent; weight decay is added to the gradient, as torch does."""

    name: str = "sgd"
    """The rule."""
    momentum: float = 0.0
    """Momentum; 0 keeps no state."""
    nesterov: bool = False
    """Nesterov momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("optimizer.name", self.name, ("sgd",))
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum={self.momentum} must lie in [0, 1). Set for example 0.9.")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optimizer.nesterov=true needs momentum. Set optimizer.momentum=0.9, or nesterov=false.")


@dataclass
class GefenConfig(OptimizerConfig):
    """Gefen (arXiv 2606.13894): AdamW with a second moment per block and an 8-bit momentum, 1 byte a parameter.

    ``memopt.gefen`` says what each option does; vectors (norms, biases) keep AdamW's moments.
    """

    name: str = "gefen"
    """The rule."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the block's second moment."""
    partition: str = "row"
    """Entries of a row that share a second moment: ``row`` (all), ``fixed`` (``block``), or found from the first
    gradient by the ``paper``'s rule or by that of later releases (``peaks``)."""
    block: int | None = None
    """partition=fixed: entries of a block; must divide every matrix's row. Costs 1 + 8 / block bytes a parameter."""
    second_moment: str = "factored"
    """``block`` (one value a block, the paper's) or ``factored`` (times a column factor)."""
    momentum: str = "8bit"
    """``8bit`` codes, or ``fp32`` (4 bytes a parameter)."""
    levels: int = 256
    """Levels of the codebook: a power of two up to 256."""
    zero_level: bool = True
    """Move the level nearest to 0 onto 0, so that a momentum of 0 stays 0. The paper does not."""
    update: str = "exact"
    """Move weights by the momentum before it is coded (``exact``), or by what is kept of it (``quantised``)."""
    max_update: float | None = None
    """Cut entries of the update, before the learning rate, to this; null cuts nothing."""
    refresh: int = 0
    """Steps after which codebook and periods are found anew; 0: never."""
    drift_interval: int = 100
    """Steps after which it is measured how many periods would be found again; 0: never."""
    backend: str = "auto"
    """``auto`` (triton on CUDA, numba on CPU), ``reference``, ``numba`` or ``triton``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("optimizer.name", self.name, ("gefen",))
        choice("optimizer.partition", self.partition, ("row", "fixed", "paper", "peaks"))
        choice("optimizer.second_moment", self.second_moment, ("block", "factored"))
        choice("optimizer.momentum", self.momentum, ("8bit", "fp32"))
        choice("optimizer.update", self.update, ("exact", "quantised"))
        choice("optimizer.backend", self.backend, ("auto", "reference", "numba", "triton"))
        above("optimizer.eps", self.eps, 0)
        _check_betas(self.betas)
        at_least("optimizer.block", self.block, 1)
        if (self.partition == "fixed") != (self.block is not None):
            raise ConfigError(
                f"optimizer.block={self.block} with optimizer.partition={self.partition}: a block is set if and only "
                "if the partition is fixed. Set optimizer.partition=fixed optimizer.block=512, for example, or neither."
            )
        if self.levels not in (2, 4, 8, 16, 32, 64, 128, 256):
            raise ConfigError(
                f"optimizer.levels={self.levels} must be a power of two from 2 to 256 (a code is one byte). Set 256."
            )
        if self.max_update is not None:
            above("optimizer.max_update", self.max_update, 0)
        at_least("optimizer.refresh", self.refresh, 0)
        at_least("optimizer.drift_interval", self.drift_interval, 0)


@dataclass
class RSOConfig(OptimizerConfig):
    """RSO (arXiv 2502.07222): linear layers train in a random subspace of their input, which changes now and then.

    A layer keeps ``rank`` numbers a token for backward instead of its input, and gradients and state of rank columns.
    """

    name: str = "rso"
    """The rule."""
    rank: int | None = None
    """Dimensions of a subspace; null: a quarter of each layer's input. A layer whose input is not wider stays dense."""
    projection: str = "coordinate"
    """``coordinate`` (columns of the unit matrix), ``haar`` (columns of a random rotation) or ``gaussian``."""
    layers: list[str] = field(default_factory=list)
    """Shell patterns of the linear layers that are projected, e.g. ``['layers.*.attention.*']``. Empty: all but the
    head. A pattern that matches no linear layer is an error."""
    interval: int = 100
    """Optimizer steps in one subspace."""
    stall: float | None = None
    """Leave a subspace early when in 20 steps the norm of its gradient fell by less than this share; null: never."""
    reset: bool = True
    """Start moments and step counter of projected layers anew at a new subspace; false: they are kept as they are."""
    proximal: float = 0.0
    """Weight of the proximal term proximal / 2 * |B|^2 of each subproblem (1 / eta in the paper); keeps B if not 0."""
    probed: int = 1
    """Layers whose B is kept to measure the effective rank of the update; 0: not measured."""
    inner: str = "adamw"
    """The rule in the subspace: ``adamw``, ``gefen`` or ``sgd``."""
    dense: str = "adamw"
    """The rule of everything else (embedding, head, norms, biases): ``adamw`` or ``gefen``."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the first and second moment, of adamw and gefen."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    momentum: float = 0.0
    """Momentum of inner=sgd."""
    lr_scale: float = 1.0
    """Factor of the learning rate of projected layers."""
    warmup: int = 0
    """Steps after a change of subspace over which that learning rate rises to its value."""
    seed: int = 0
    """Of the subspaces: with a layer's name and the number of the subspace it gives the same one again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("optimizer.name", self.name, ("rso",))
        choice("optimizer.projection", self.projection, ("coordinate", "haar", "gaussian"))
        choice("optimizer.inner", self.inner, ("adamw", "gefen", "sgd"))
        choice("optimizer.dense", self.dense, ("adamw", "gefen"))
        at_least("optimizer.rank", self.rank, 1)
        at_least("optimizer.seed", self.seed, 0)
        at_least("optimizer.interval", self.interval, 1)
        at_least("optimizer.warmup", self.warmup, 0)
        at_least("optimizer.proximal", self.proximal, 0)
        at_least("optimizer.probed", self.probed, 0)
        if self.stall is not None and not 0 <= self.stall < 1:
            raise ConfigError(f"optimizer.stall={self.stall} must lie in [0, 1). Set for example 0.01, or null.")
        above("optimizer.lr_scale", self.lr_scale, 0)
        above("optimizer.eps", self.eps, 0)
        _check_betas(self.betas)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum={self.momentum} must lie in [0, 1). Set for example 0.9.")


def _check_betas(betas: list[float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(
            f"optimizer.betas={list(betas)} must be two numbers in [0, 1). Set for example optimizer.betas=[0.9,0.95]."
        )
