"""Linear layers that train in a random subspace and keep r numbers a token for backward (RSO, arXiv 2502.07222).

A projected layer has a frozen weight W (out, in) and trains B (out, r) from 0: its weight is W + B P^T. Backward needs
the input Y only as A = Y P, r numbers a token:

    dB = dZ^T A        dY = dZ (W + B P^T)

Merged form: the optimizer adds every step of B to W at once (``memopt.rso``), so that W is the whole weight, B stays 0
and the forward pass is one GEMM and Y P. ``two_path_linear`` is the same layer without merging, for comparison.

Layers that read one input share one P and one A: their parent names them in ``reads_one_input`` and calls
``together`` (``models.llama3.SwiGLU`` does). One autograd function then covers all of them, which is what keeps one A
for both; a cache of A between two functions cannot, since activation checkpointing runs them again.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memopt.projection import Projection, project

B_NAME = "subspace"
"""Name of the parameter B of a projected layer."""
MERGEABLE = (torch.float32, torch.float64, torch.bfloat16)
HEAD_NAMES = ("lm_head", "head", "output", "classifier", "score", "embed_out")


class SubspaceLinear(nn.Linear):
    """What a projected ``nn.Linear`` becomes: the module is the same one, of this class too."""

    projection: Projection
    subspace: nn.Parameter
    """B (out, r): 0 between steps; its gradient is what is reduced and what the inner optimizer reads."""
    full_name: str
    """Name of the module in its model, as it was converted."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.together(x, [self])[0]

    @staticmethod
    def together(x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...]:
        """The outputs of layers that read one input; those of one P keep one A."""
        if not all(getattr(layer, "projection", None) is layers[0].projection for layer in layers):
            return tuple(layer(x) for layer in layers)
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers]
        if not torch.is_grad_enabled():
            return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        p = layers[0].projection
        subspaces = [layer.subspace for layer in layers]
        outputs: tuple[Tensor, ...] = _Merged.apply(  # type: ignore[no-untyped-call]
            x, p.values, p.scale, len(layers), *weights, *subspaces, *biases
        )
        return outputs

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # B is 0: a state dict is that of the dense model, and goes into it
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + B_NAME, None)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        b = self._parameters.pop(B_NAME)
        try:
            super()._load_from_state_dict(*arguments)
        finally:
            self._parameters[B_NAME] = b


class _Merged(torch.autograd.Function):
    """x (..., in), n weights (out, in), n of B (out, r), n biases (out,) or None -> n outputs (..., out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scale: float, n: int, *tensors: Any) -> tuple[Tensor, ...]:
        weights, subspaces, biases = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
        outputs = tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        # of the type that the GEMMs ran in, also under autocast
        coded = project(x.to(outputs[0].dtype), values, scale)
        ctx.save_for_backward(coded, *weights)
        ctx.input_type = x.dtype
        ctx.types = [part.dtype for part in subspaces]
        ctx.bias_types = [None if bias is None else bias.dtype for bias in biases]
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        coded, *weights = ctx.saved_tensors
        n = len(weights)
        needs_x, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[4 + n :]
        flat = coded.reshape(-1, coded.shape[-1])
        grad_x: Tensor | None = None
        grad_subspaces: list[Tensor | None] = []
        grad_biases: list[Tensor | None] = []
        for k, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            rows = grad.reshape(-1, grad.shape[-1])
            grad_subspaces.append((rows.t() @ flat).to(ctx.types[k]) if needed[k] else None)
            grad_biases.append(rows.sum(0).to(ctx.bias_types[k]) if needed[n + k] else None)
            if needs_x:
                part = rows @ weight.to(rows.dtype) if grad_x is None else grad_x.addmm_(rows, weight.to(rows.dtype))
                grad_x = part
        if grad_x is not None:
            grad_x = grad_x.view(*grads[0].shape[:-1], weights[0].shape[1]).to(ctx.input_type)
        return grad_x, None, None, None, *[None] * n, *grad_subspaces, *grad_biases


def two_path_linear(
    x: Tensor, weight: Tensor, subspace: Tensor, projection: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x W^T + (x P) B^T + bias: the layer before merging. x (..., in), W (out, in), B (out, r), P (in, r)."""
    return F.linear(x, weight, bias) + (x @ projection) @ subspace.t()


@dataclass(eq=False)
class Group:
    """Projected layers that read one input."""

    name: str
    """Name of the first one; with seed and outer index the key of its P."""
    layers: dict[str, SubspaceLinear]
    """Module name -> layer."""

    @property
    def projection(self) -> Projection:
        """Their P."""
        return next(iter(self.layers.values())).projection


def convert(
    model: nn.Module,
    *,
    rank: int | None = None,
    projection: str = "coordinate",
    layers: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Make linear layers of ``model`` train in a subspace, in place. Before it is wrapped, sharded or compiled.

    Their weights are frozen and stay what they are (names, values, shapes); each gets a parameter ``subspace``.

    Args:
        model: any module.
        rank: r; None for a quarter of each layer's input, rounded up.
        projection: ``haar``, ``coordinate`` or ``gaussian``.
        layers: shell patterns of module names. Empty: every ``nn.Linear`` that can be projected but the head
            (``HEAD_NAMES`` at the top level).
        dtype: in which a haar or gaussian P is held: that of the matrix products.

    Returns:
        Names of layers that were chosen but stay dense, because ``rank`` is not below their input width.

    Raises:
        ValueError: a rank that is no positive integer, a pattern that matches no linear layer, or one that cannot be
            projected: its weight is tied, frozen, computed, or of a type that steps cannot be merged into; it has a
            ``forward`` of its own; or its parent uses the weight without calling it.
    """
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise ValueError(f"rank={rank!r} must be a whole number from 1. Set for example 128, or null for in / 4.")
    chosen = _choose(model, layers)
    for name, layer in chosen.items():
        if layer.weight.dtype not in MERGEABLE:
            raise ValueError(
                f"{name}.weight is {layer.weight.dtype}. Steps are merged into fp32, fp64 or bf16 weights."
            )
    left_dense = []
    for members in _groups_of(model, chosen):
        width = chosen[members[0]].in_features
        r = -(-width // 4) if rank is None else rank
        if r >= width:
            left_dense += members
            for name in members:
                # for the head of a log
                chosen[name].left_dense = f"rank {r} of {width}"  # type: ignore[assignment]
            continue
        shared = Projection(projection, width, r, chosen[members[0]].weight.device, dtype)
        for name in members:
            _convert_layer(chosen[name], name, shared)
    return left_dense


def groups(model: nn.Module) -> list[Group]:
    """The projected layers of a converted model, by shared P, in the model's order. Wrapping does not change them."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, SubspaceLinear)}
    # parts of the model that were converted alone may have layers of one name
    unique = len({layer.full_name for layer in layers.values()}) == len(layers)
    found: dict[int, Group] = {}
    for path, layer in layers.items():
        name = layer.full_name if unique else path
        found.setdefault(id(layer.projection), Group(name, {})).layers[name] = layer
    return list(found.values())


def is_subspace(name: str) -> bool:
    """Whether a parameter of this name is B of a projected layer: 0, and no part of a checkpoint."""
    return name.rpartition(".")[2] == B_NAME


def together(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of linear layers that read one input; projected ones of one P keep one A for all."""
    if isinstance(layers[0], SubspaceLinear):
        return layers[0].together(x, layers)
    return tuple(layer(x) for layer in layers)


def _convert_layer(layer: nn.Linear, name: str, projection: Projection) -> None:
    layer.weight.requires_grad_(False)
    b = layer.weight.new_zeros(layer.out_features, projection.rank)
    layer.register_parameter(B_NAME, nn.Parameter(b))
    # hooks, children and isinstance checks of the module's own class go on working
    kind = type(layer)
    layer.__class__ = type(f"Subspace{kind.__name__}", (SubspaceLinear, kind), {})
    layer.projection, layer.full_name = projection, name  # type: ignore[assignment]


def _choose(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Linear]:
    """Module name -> linear layer to project, in the model's order."""
    modules = dict(model.named_modules())
    if already := next((name for name, module in modules.items() if isinstance(module, SubspaceLinear)), None):
        raise ValueError(f"{already} is a projected layer already. Convert a model once.")
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    problems = _problems(modules, linears)
    if not patterns:
        return {name: linear for name, linear in linears.items() if name not in problems and name not in HEAD_NAMES}
    names: set[str] = set()
    for pattern in patterns:
        if not (matched := fnmatch.filter(linears, pattern)):
            some = fnmatch.filter(modules, pattern)
            what = f"matches {type(modules[some[0]]).__name__} modules only" if some else "matches no module"
            raise ValueError(
                f"the pattern {pattern!r} of projected layers {what}. Linear layers are called "
                f"{', '.join(list(linears)[:3])}; use for example 'layers.*'."
            )
        names.update(matched)
    if wrong := sorted(names & problems.keys()):
        raise ValueError(f"{wrong[0]} cannot be projected: {problems[wrong[0]]}. Leave it out of the patterns.")
    return {name: linear for name, linear in linears.items() if name in names}


def _problems(modules: dict[str, nn.Module], linears: dict[str, nn.Linear]) -> dict[str, str]:
    """Name -> why a linear layer cannot be projected."""
    owners: dict[int, list[str]] = {}
    # torch's attention multiplies by the weight of its output layer itself
    unread = {id(module.out_proj) for module in modules.values() if isinstance(module, nn.MultiheadAttention)}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{name}.{key}")
    problems = {}
    for name, linear in linears.items():
        if "weight" not in linear._parameters:
            problems[name] = "its weight is computed from other parameters"
        elif len(tied := owners[id(linear.weight)]) > 1:
            problems[name] = f"{' and '.join(tied)} are one tied weight"
        elif not linear.weight.requires_grad:
            problems[name] = "its weight is frozen"
        elif type(linear).forward is not nn.Linear.forward:
            problems[name] = f"{type(linear).__name__} has a forward of its own"
        elif id(linear) in unread:
            problems[name] = "its parent uses the weight without calling the layer"
    return problems


def _groups_of(model: nn.Module, chosen: dict[str, nn.Linear]) -> Iterator[list[str]]:
    """Names that share a P: those that their parent names in ``reads_one_input``, others alone."""
    shared: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        for children in getattr(module, "reads_one_input", ()):
            paths = tuple(f"{name}.{child}" if name else child for child in children)
            shared |= dict.fromkeys(paths, paths)
    done: set[str] = set()
    for name in chosen:
        if name not in done:
            members = [member for member in shared.get(name, (name,)) if member in chosen]
            done.update(members)
            yield members
