"""RSO, Randomized Subspace Optimization (Chen, Zhang, Liu, Yuan, Wen; arXiv 2502.07222; ICML 2025).

Every projected layer (``memopt.subspace``) trains B (out, r) of W + B P^T by an inner optimizer. After ``interval``
steps the subspace changes: B goes into W and starts from 0 with a new P. In the merged form used here every step of B
goes into W at once, so that B is 0 always and never stored: the inner optimizer writes its step into memory that lives
during the step (``memopt.placeholder``). W, the gradient of B and the inner state are sharded on ``out``, so that a
merge is local; only gradients of B are reduced, and where rows are replicated, steps of B (out, r) are gathered.

What the paper leaves open is decided here: inner moments and their counter start anew with every subspace
(``moments="reset"``; ``keep`` carries them over as they are), weight decay acts on W, clipping on the gradient of B.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memopt import layout, placeholder, subspace
from memopt.projection import KINDS, SAMPLER_VERSION, Projection, draw_all
from memopt.rules import build_rule
from memopt.sharded import StateOptimizer

MOMENTS = ("reset", "keep")
# options of the rules where none are given
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "eps": 1e-8},
    "gefen": {"betas": (0.9, 0.95), "eps": 1e-8},
    "sgd": {"momentum": 0.0},
}


class RSO:
    """The optimizer of a model that ``RSO.convert`` has changed; made after sharding, before the first forward.

    Args:
        model: the converted model, wrapped or not.
        lr: learning rate of everything.
        weight_decay: decoupled, on the weights of projected layers and on dense matrices.
        inner: rule of B: ``adamw``, ``gefen`` or ``sgd``.
        dense: rule of everything that is not projected: ``adamw`` or ``gefen``.
        interval: steps in one subspace.
        moments: what becomes of the inner state at a new subspace: ``reset`` or ``keep``.
        lr_scale: factor of the learning rate of projected layers.
        warmup: steps after a change of subspace over which their learning rate rises to its value.
        seed: with the names of layers and the number of the subspace the key of every P.
        named_parameters: name -> parameter; names that do not depend on wrappers. None: those of the model.
        decayed: names of parameters that are decayed. None: every matrix.
        options: by rule, what ``memopt.rules.build_rule`` takes beyond ``lr``.

    Raises:
        ValueError: nothing is projected, or a setting that cannot work.
    """

    convert = staticmethod(subspace.convert)

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        inner: str = "adamw",
        dense: str = "adamw",
        interval: int = 100,
        moments: str = "reset",
        lr_scale: float = 1.0,
        warmup: int = 0,
        seed: int = 0,
        named_parameters: Mapping[str, Tensor] | None = None,
        decayed: Collection[str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        if interval < 1:
            raise ValueError(f"interval={interval} must be at least 1 step. Set for example 100.")
        if moments not in MOMENTS:
            raise ValueError(f"moments={moments!r} is not one of {', '.join(MOMENTS)}.")
        self._groups = subspace.groups(model)
        if not self._groups:
            raise ValueError("no layer of the model is projected. Call RSO.convert(model) before RSO(model).")
        self._interval, self._moments, self._seed = interval, moments, seed
        self._lr_scale, self._warmup = lr_scale, warmup
        named = dict(named_parameters or model.named_parameters())
        self._layers = {
            name: _Layer(group.projection, layer.weight, layer.subspace)
            for group in self._groups
            for name, layer in group.layers.items()
        }
        for name, layer in self._layers.items():
            layer.decay = weight_decay if decayed is None or f"{name}.weight" in decayed else 0.0
        for group in self._groups:
            group.projection.move(next(iter(group.layers.values())).subspace.device)
        placeholder.release(model, [layer.b for layer in self._layers.values()])
        projected = {_b_name(name): layer.b for name, layer in self._layers.items()}
        subspaces = {id(b) for b in projected.values()}
        rest = {name: p for name, p in named.items() if p.requires_grad and id(p) not in subspaces}
        chosen = {name for name, p in rest.items() if (p.ndim >= 2 if decayed is None else name in decayed)}
        groups = [
            {"named_parameters": projected, "weight_decay": 0.0, "projected": True},
            {"named_parameters": {n: p for n, p in rest.items() if n in chosen}, "weight_decay": weight_decay},
            {"named_parameters": {n: p for n, p in rest.items() if n not in chosen}, "weight_decay": 0.0},
        ]
        given = {rule: {**DEFAULTS[rule], **(options or {}).get(rule, {})} for rule in DEFAULTS}
        parts = [(inner, groups)] if inner == dense else [(inner, groups[:1]), (dense, groups[1:])]
        self._rules = [build_rule(rule, part, lr=lr, **given[rule]) for rule, part in parts]
        device = next(iter(self._layers.values())).b.device
        kind = KINDS.index(self._groups[0].projection.kind)
        self._outer = torch.zeros((), dtype=torch.int64)
        self._steps = torch.zeros((), dtype=torch.int64)
        self._key = torch.tensor([SAMPLER_VERSION, kind, seed], dtype=torch.int64)
        self._grad_norm = torch.zeros((), dtype=torch.float64, device=device)
        self.set_lr(lr)
        self._draw()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the inner rule and of the rule of the rest."""
        return [group for rule in self._rules for group in rule.param_groups]

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        steps = int(self._steps)
        rising = min(1.0, (steps + 1) / self._warmup) if self._warmup else 1.0
        for group in self.param_groups:
            group["lr"] = lr * self._lr_scale * rising if group.get("projected") else lr
            if group.get("projected"):
                self._projected_lr = group["lr"]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for rule in self._rules:
            rule.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """One inner step, merged into the weights; after ``interval`` of them a new subspace. Collective."""
        active = {name: layer for name, layer in self._layers.items() if layer.b.grad is not None}
        with placeholder.held([layer.b for layer in active.values()]):
            for rule in self._rules:
                rule.step()
            for layer in active.values():
                keep = 1.0 - self._projected_lr * layer.decay
                weight, b = (layout.local_rows(each.detach()) for each in (layer.weight, layer.b))
                layer.projection.merge_(weight, b, keep)
        self._steps += 1
        if int(self._steps) >= self._interval:
            self._change_subspace()

    def init_state(self) -> None:
        """Allocate all state now; parameters, counters and random state stay as they are."""
        for rule in self._rules:
            rule.init_state()

    def state_tensors(self) -> dict[str, Tensor]:
        """Those of the rules, and ``rso.outer``, ``rso.steps``, ``rso.key``.

        Number of the subspace, steps in it, and (sampler version, kind, seed): int64.
        """
        tensors = {name: tensor for rule in self._rules for name, tensor in rule.state_tensors().items()}
        return tensors | {"rso.outer": self._outer, "rso.steps": self._steps, "rso.key": self._key}

    @contextmanager
    def loading(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, Tensor]]:
        """As of every optimizer of the trainer; P of the checkpoint is drawn again at the end.

        Raises:
            ValueError: the checkpoint's P come from another sampler, kind or seed.
        """
        outer, steps, key = self._outer.clone(), self._steps.clone(), self._key.clone()
        own = {"rso.outer": outer, "rso.steps": steps, "rso.key": key}
        yield from self._loading(self._rules, shapes, own)
        if not key.equal(self._key):
            found, wanted = (_describe_key(each) for each in (key, self._key))
            raise ValueError(f"the checkpoint's subspaces are of {found}, this run's of {wanted}. Set what it had.")
        self._outer.copy_(outer)
        self._steps.copy_(steps)
        self._draw()

    def _loading(
        self, rules: Sequence[StateOptimizer], shapes: Mapping[str, Sequence[int]], tensors: dict[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        if not rules:
            yield tensors
            return
        with rules[0].loading(shapes) as state:
            yield from self._loading(rules[1:], shapes, tensors | state)

    def reset(self, names: Collection[str]) -> None:
        """As of every optimizer of the trainer."""
        for rule in self._rules:
            rule.reset(names)

    def state_bytes(self) -> int:
        """Bytes of state that this rank holds: that of the rules, and every P."""
        return sum(rule.state_bytes() for rule in self._rules) + sum(g.projection.nbytes() for g in self._groups) + 40

    @property
    def state_is_final(self) -> bool:
        """Whether ``state_bytes`` is exact and stays."""
        return all(rule.state_is_final for rule in self._rules)

    def transient_bytes(self) -> int:
        """Bytes that a step allocates and frees again: those of the rules, and the step of every B."""
        steps = sum(4 * layout.local_rows(layer.b.detach()).numel() for layer in self._layers.values())
        return steps + max(rule.transient_bytes() for rule in self._rules)

    def periodic_bytes(self) -> int:
        """The same for the steps that do more; drawing a P takes it three times in fp64, on the CPU."""
        steps = sum(4 * layout.local_rows(layer.b.detach()).numel() for layer in self._layers.values())
        drawing = max(24 * group.projection.values.numel() for group in self._groups)
        return max(steps + max(rule.periodic_bytes() for rule in self._rules), drawing)

    def gauges(self) -> dict[str, float | None]:
        """What the rules report, and of the subspaces: ``subspace`` (its number), ``orthogonality_error`` (worst P)."""
        found: dict[str, float | None] = {}
        for rule in self._rules:
            found |= rule.gauges()
        error = max(group.projection.orthogonality_error() for group in self._groups)
        return {**found, "subspace": float(self._outer), "orthogonality_error": error}

    def _change_subspace(self) -> None:
        self._steps.zero_()
        self._outer += 1
        if self._moments == "reset":
            names = [_b_name(name) for name in self._layers]
            self._rules[0].reset(names)
        self._draw()

    def _draw(self) -> None:
        draw_all([(group.name, group.projection) for group in self._groups], self._seed, int(self._outer))


class _Layer:
    """A projected layer as the optimizer sees it: its P, W and B, and the decay of W."""

    def __init__(self, projection: Projection, weight: Tensor, b: nn.Parameter) -> None:
        self.projection, self.weight, self.b, self.decay = projection, weight, b, 0.0


def _b_name(name: str) -> str:
    return f"{name}.{subspace.B_NAME}"


def _describe_key(key: Tensor) -> str:
    version, kind, seed = key.tolist()
    known = KINDS[kind] if 0 <= kind < len(KINDS) else kind
    return f"projection={known}, seed={seed}, sampler version {version}"
