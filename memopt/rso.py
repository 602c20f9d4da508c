"""RSO, Randomized Subspace Optimization (Chen, Zhang, Liu, Yuan, Wen; arXiv 2502.07222; ICML 2025).

Every projected layer (``memopt.subspace``) trains B (out, r) of W + B P^T by an inner optimizer. After ``interval``
steps the subspace changes: B goes into W and starts from 0 with a new P. In the merged form used here every step of B
goes into W at once, so that B is 0 always and never stored: the inner optimizer writes its step into memory that lives
during the step (``memopt.virtual``). W, the gradient of B and the inner state are sharded on ``out``, so that a
merge is local; only gradients of B are reduced, and where rows are replicated, steps of B (out, r) are gathered.

What the paper leaves open is decided here: inner moments and their counter start anew with every subspace
(``reset=False`` carries them over as they are), weight decay acts on W, clipping on the gradient of B.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memopt import layout, subspace, virtual
from memopt.projection import KINDS, SAMPLER_VERSION, draw_all
from memopt.rso_progress import Progress, Values
from memopt.rules import RULES, build_rule
from memopt.sharded import StateOptimizer

DENSE_RULES = ("adamw", "gefen")
# options of the rules where none are given
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "eps": 1e-8},
    "gefen": {"betas": (0.9, 0.95), "eps": 1e-8},
    "sgd": {"momentum": 0.0},
}


class RSO(torch.optim.Optimizer):
    """The optimizer of a model that ``RSO.convert`` has changed; made after sharding, before the first forward.

    Its groups are in torch's form, so that learning-rate schedulers work. Group 0 is B of the projected layers; its
    ``weight_decay`` acts on their weights.

    Args:
        model: the converted model, wrapped or not.
        lr: learning rate of everything.
        weight_decay: decoupled, on the weights of projected layers and on dense matrices.
        inner: rule of B: ``adamw``, ``gefen`` or ``sgd``.
        dense: rule of everything that is not projected: ``adamw`` or ``gefen``.
        interval: steps in one subspace.
        stall: leave a subspace early, when over ``memopt.rso_progress.WINDOW`` steps the norm of the gradient of B has
            fallen by less than this share. None: stay for ``interval`` steps.
        reset: start moments and step counter of B anew with every subspace; False: keep them as they are.
        proximal: weight of the term ``proximal / 2 * |B|^2`` of the subproblem (1 / eta in the paper); then B is kept.
        lr_scale: factor of the learning rate of projected layers.
        warmup: steps after a change of subspace over which their learning rate rises to its value.
        rounding: of steps merged into bf16 weights: ``stochastic``, so that small ones are not lost, or ``nearest``.
        probed: number of layers whose B is kept to measure the effective rank of their update.
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
        stall: float | None = None,
        reset: bool = True,
        proximal: float = 0.0,
        lr_scale: float = 1.0,
        warmup: int = 0,
        rounding: str = "stochastic",
        probed: int = 1,
        seed: int = 0,
        named_parameters: Mapping[str, Tensor] | None = None,
        decayed: Collection[str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        _check(interval, stall, proximal, lr_scale, warmup, rounding)
        _check_rules(inner, dense, options or {}, weight_decay, seed)
        self._subspaces = subspace.groups(model)
        if not self._subspaces:
            raise ValueError("no layer of the model is projected. Call RSO.convert(model) before RSO(model).")
        self._interval, self._resets, self._proximal, self._seed = interval, reset, proximal, seed
        self._lr_scale, self._warmup, self._rounding = lr_scale, warmup, rounding
        self._layers = {name: layer for group in self._subspaces for name, layer in group.layers.items()}
        modules = dict(model.named_modules())
        self._dense = {path: module.left_dense for path, module in modules.items() if hasattr(module, "left_dense")}
        # parameters as they are while sharded: within a forward pass a layer has others
        self._weights = {name: layer.weight for name, layer in self._layers.items()}
        self._b = {name: layer.subspace for name, layer in self._layers.items()}
        self._decayed = {name for name in self._layers if decayed is None or f"{name}.weight" in decayed}
        for group in self._subspaces:
            group.projection.move(self._b[group.name].device)
        virtual.release(model, list(self._b.values()))

        own = {id(b) for b in self._b.values()}
        named = {n: p for n, p in (named_parameters or dict(model.named_parameters())).items() if id(p) not in own}
        rest = {name: p for name, p in named.items() if p.requires_grad}
        chosen = {name for name, p in rest.items() if (p.ndim >= 2 if decayed is None else name in decayed)}
        parts: list[dict[str, Tensor]] = [
            {_b_name(name): b for name, b in self._b.items()},
            {name: p for name, p in rest.items() if name in chosen},
            {name: p for name, p in rest.items() if name not in chosen},
        ]
        decays = (weight_decay, weight_decay, 0.0)
        groups = [(part, decay) for part, decay in zip(parts, decays, strict=True) if part]
        super().__init__([{"params": list(part.values()), "weight_decay": decay} for part, decay in groups], {"lr": lr})
        self.set_lr(lr)
        self._rules = _build_rules(inner, dense, [part for part, _ in groups], lr, options or {})
        kept = list(self._layers) if proximal else _spread(list(self._layers), probed)
        self._values = Values({name: self._b[name] for name in kept})
        self._progress = Progress(list(self._b.values()), stall)
        self._outer = torch.zeros((), dtype=torch.int64)
        self._steps = torch.zeros((), dtype=torch.int64)
        kind = KINDS.index(self._subspaces[0].projection.kind)
        self._key = torch.tensor([SAMPLER_VERSION, kind, seed], dtype=torch.int64)
        self._draw()

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step, of all groups; that of projected layers times ``lr_scale``."""
        for index, group in enumerate(self.param_groups):
            group["lr"] = lr if index else lr * self._lr_scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One inner step, merged into the weights; after ``interval`` of them a new subspace. Collective.

        Args:
            closure: computes the loss anew and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = {name: b for name, b in self._b.items() if b.grad is not None}
        if self._proximal:
            self._values.add_to_gradients(self._proximal)
        self._progress.measure()
        lr = self._hand_down_numbers()
        with virtual.held(list(self._b.values())):
            for rule in self._rules:
                rule.step()
            self._values.add_steps(active)
            for name, b in active.items():
                self._merge(name, layout.local_rows(b.detach()), lr)
        self._steps += 1
        if int(self._steps) >= self._interval or self._progress.has_stalled():
            self._change_subspace()
        return loss

    def init_state(self) -> None:
        """Allocate all state now; parameters, counters and random state stay as they are."""
        for rule in self._rules:
            rule.init_state()

    def state_tensors(self) -> dict[str, Tensor]:
        """Those of the rules; ``<layer>.subspace.value`` of layers whose B is kept; and ``rso.*``.

        ``rso.outer`` is the number of the subspace, ``rso.steps`` the steps in it, ``rso.key`` (sampler version, kind,
        seed), int64; ``rso.progress`` as in ``memopt.rso_progress``, fp64. Nothing else of a P is saved.
        """
        tensors = {name: tensor for rule in self._rules for name, tensor in rule.state_tensors().items()}
        values = {f"{_b_name(name)}.value": tensor for name, tensor in self._values.state.items()}
        return tensors | values | self._counters()

    def held_tensors(self) -> list[Tensor]:
        """Every P, and what the rules hold."""
        projections = [group.projection.values for group in self._subspaces]
        return projections + [tensor for rule in self._rules for tensor in rule.held_tensors()]

    @contextmanager
    def loading(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, Tensor]]:
        """As of every optimizer of the trainer; P of the checkpoint is drawn again at the end.

        Raises:
            ValueError: the checkpoint's P come from another sampler, kind or seed.
        """
        saved = {name: tensor.clone() for name, tensor in self._counters().items()}
        values = {f"{_b_name(name)}.value": tensor for name, tensor in self._values.state.items()}
        yield from self._loading(self._rules, shapes, saved | values)
        if not saved["rso.key"].equal(self._key):
            found, wanted = (_describe_key(key) for key in (saved["rso.key"], self._key))
            raise ValueError(f"the checkpoint's subspaces are of {found}, this run's of {wanted}. Set what it had.")
        for name, tensor in self._counters().items():
            tensor.copy_(saved[name])
        self._draw()

    def state_dict(self) -> dict[str, Any]:
        """``state``: name -> tensor as ``state_tensors``; ``param_groups``: their numbers."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {
            "state": {name: tensor.clone() for name, tensor in self.state_tensors().items()},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave, on the same ranks and layout.

        Raises:
            ValueError: names or shapes are not those of this optimizer.
        """
        saved = state_dict["state"]
        with self.loading({name: tuple(tensor.shape) for name, tensor in saved.items()}) as state:
            wrong = [name for name in saved.keys() | state.keys() if not _alike(saved.get(name), state.get(name))]
            if wrong:
                raise ValueError(f"the saved state does not fit this optimizer: {', '.join(sorted(wrong)[:3])} differ.")
            for name, tensor in state.items():
                tensor.copy_(saved[name])
        for group, numbers in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(numbers)

    def reset(self, names: Collection[str]) -> None:
        """As of every optimizer of the trainer."""
        for rule in self._rules:
            rule.reset(names)

    def state_bytes(self) -> int:
        """Bytes of state that this rank holds: that of the rules, kept B, every P and counters."""
        counters = sum(tensor.nbytes for tensor in self._counters().values())
        projections = sum(group.projection.nbytes() for group in self._subspaces)
        return sum(rule.state_bytes() for rule in self._rules) + self._values.nbytes() + projections + counters

    @property
    def state_is_final(self) -> bool:
        """Whether ``state_bytes`` is exact and stays."""
        return all(rule.state_is_final for rule in self._rules)

    def transient_bytes(self) -> int:
        """Bytes that a step allocates and frees again: those of the rules, and the step of every B."""
        return self._step_bytes() + max(rule.transient_bytes() for rule in self._rules)

    def periodic_bytes(self) -> int:
        """The same for the steps that do more; drawing a P takes it three times in fp64, on the CPU."""
        drawing = max(24 * group.projection.values.numel() for group in self._subspaces)
        return max(self._step_bytes() + max(rule.periodic_bytes() for rule in self._rules), drawing)

    def notes(self) -> list[dict[str, Any]]:
        """What is projected, for the head of a log: layers of one shape together.

        Rank, bytes of a gradient in fp32, as it is reduced, and of the dense one, bytes of P; and what stays dense.
        """
        found: dict[tuple[str, int, int], dict[str, Any]] = {}
        for group in self._subspaces:
            p = group.projection
            layers = "+".join(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in group.layers)
            sums = dict.fromkeys(("count", "gradient_bytes", "dense_bytes", "held_bytes"), 0)
            empty = {"layers": layers, "rank": p.rank, "width": p.width, **sums}
            note = found.setdefault((layers, p.rank, p.width), empty)
            note["count"] += len(group.layers)
            note["gradient_bytes"] += 4 * sum(self._b[name].numel() for name in group.layers)
            note["dense_bytes"] += 4 * sum(self._weights[name].numel() for name in group.layers)
            note["held_bytes"] += p.nbytes()
        for name, why in self._dense.items():
            layers = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            note = found.setdefault((layers, 0, 0), {"layers": layers, "count": 0, "stays_dense": why})
            note["count"] += 1
        return list(found.values())

    def gauges(self) -> dict[str, float | None]:
        """What the rules report, and of the subspaces, over all ranks; collective.

        ``subspace``: its number; ``orthogonality_error``: of the worst P; ``subspace_gradient_norm``: |grad B| of the
        last step; ``subspace_progress``: share by which its average has fallen since the first step in the subspace;
        ``effective_rank``: exp of the entropy of the normalised squared singular values of B since then, over r, mean
        of the probed layers.
        """
        found: dict[str, float | None] = {"subspace": float(self._outer)}
        for rule in self._rules:
            found |= rule.gauges()
        found["orthogonality_error"] = max(group.projection.orthogonality_error() for group in self._subspaces)
        return {**found, **self._progress.gauges(), "effective_rank": self._values.effective_rank()}

    def _hand_down_numbers(self) -> float:
        """Give the rules the numbers of the groups; the learning rate of projected layers in this step."""
        steps = int(self._steps) + 1
        rising = min(1.0, steps / self._warmup) if self._warmup else 1.0
        below = [group for rule in self._rules for group in rule.param_groups]
        for index, (group, own) in enumerate(zip(below, self.param_groups, strict=True)):
            group["lr"] = own["lr"] if index else own["lr"] * rising
            if index:
                group["weight_decay"] = own["weight_decay"]
        lr: float = below[0]["lr"]
        return lr

    def _merge(self, name: str, step: Tensor, lr: float) -> None:
        decay = self.param_groups[0]["weight_decay"] if name in self._decayed else 0.0
        weight = layout.local_rows(self._weights[name].detach())
        generator = None
        if weight.dtype == torch.bfloat16 and self._rounding == "stochastic":
            # the same on all copies of these rows
            key = f"{self._seed} {name} {int(self._outer)} {int(self._steps)} {layout.first_row(self._weights[name])}"
            digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
            generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest, "big") >> 1)
        self._layers[name].projection.merge_(weight, step, 1.0 - lr * decay, generator)

    def _change_subspace(self) -> None:
        self._steps.zero_()
        self._outer += 1
        self._progress.restart()
        self._values.restart()
        if self._resets:
            self._rules[0].reset([_b_name(name) for name in self._b])
        self._draw()

    def _draw(self) -> None:
        draw_all([(group.name, group.projection) for group in self._subspaces], self._seed, int(self._outer))

    def _counters(self) -> dict[str, Tensor]:
        own = {"outer": self._outer, "steps": self._steps, "key": self._key, "progress": self._progress.numbers}
        return {f"rso.{key}": tensor for key, tensor in own.items()}

    def _step_bytes(self) -> int:
        return sum(layout.local_rows(b.detach()).numel() * b.element_size() for b in self._b.values())

    def _loading(
        self, rules: Sequence[StateOptimizer], shapes: Mapping[str, Sequence[int]], tensors: dict[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        if not rules:
            yield tensors
            return
        with rules[0].loading(shapes) as state:
            yield from self._loading(rules[1:], shapes, tensors | state)


def _check(interval: int, stall: float | None, proximal: float, lr_scale: float, warmup: int, rounding: str) -> None:
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(f"interval={interval} must be a whole number of steps from 1. Set for example 100.")
    if stall is not None and not 0 <= stall < 1:
        raise ValueError(f"stall={stall} must lie in [0, 1). Set for example 0.01, or None.")
    if proximal < 0:
        raise ValueError(f"proximal={proximal} must be >= 0. Set 0 for no such term.")
    if not lr_scale > 0:
        raise ValueError(f"lr_scale={lr_scale} must be above 0. Set for example 1.")
    if rounding not in ("stochastic", "nearest"):
        raise ValueError(f"rounding={rounding!r} is not one of stochastic, nearest.")
    if warmup < 0:
        raise ValueError(f"warmup={warmup} must be >= 0 steps.")


def _check_rules(
    inner: str, dense: str, options: Mapping[str, Mapping[str, Any]], weight_decay: float, seed: int
) -> None:
    for key, rule, allowed in (("inner", inner, RULES), ("dense", dense, DENSE_RULES)):
        if rule not in allowed:
            raise ValueError(f"{key}={rule!r} is not one of {', '.join(allowed)}.")
    if unknown := sorted(options.keys() - set(RULES)):
        raise ValueError(f"options has {unknown[0]!r}, which is not one of the rules {', '.join(RULES)}.")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay={weight_decay} must be a number >= 0. Set for example 0.1.")
    if seed < 0:
        raise ValueError(f"seed={seed} must be >= 0.")


def _build_rules(
    inner: str, dense: str, parts: Sequence[Mapping[str, Tensor]], lr: float, options: Mapping[str, Mapping[str, Any]]
) -> list[StateOptimizer]:
    """The rule of B, the first of ``parts``, and that of the others; one rule for all where they are the same."""
    # the numbers of the groups are handed down before every step; B itself is never decayed
    groups = [{"named_parameters": part, "weight_decay": 0.0} for part in parts]
    by_rule = [(inner, groups)] if inner == dense else [(inner, groups[:1]), (dense, groups[1:])]
    given = {rule: {**DEFAULTS[rule], **options.get(rule, {})} for rule in DEFAULTS}
    return [build_rule(rule, part, lr=lr, **given[rule]) for rule, part in by_rule if part]


def _spread(names: Sequence[str], count: int) -> list[str]:
    """``count`` of the names, evenly spaced."""
    count = min(count, len(names))
    return [names[(2 * k + 1) * len(names) // (2 * count)] for k in range(count)]


def _alike(first: Tensor | None, second: Tensor | None) -> bool:
    return first is not None and second is not None and first.shape == second.shape and first.dtype == second.dtype


def _b_name(name: str) -> str:
    return f"{name}.{subspace.B_NAME}"


def _describe_key(key: Tensor) -> str:
    version, kind, seed = key.tolist()
    known = KINDS[kind] if 0 <= kind < len(KINDS) else kind
    return f"projection={known}, seed={seed}, sampler version {version}"
