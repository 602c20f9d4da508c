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
    def together(x: Tensor, layers: Sequence["SubspaceLinear"]) -> tuple[Tensor, ...]:
        """The outputs of layers of one P for one input."""
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
            grad_x = grad_x.view(*grads[0].shape[:-1], -1).to(ctx.input_type)
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
        layers: shell patterns of module names. Empty: every ``nn.Linear`` but the head (``HEAD_NAMES`` at the top
            level) and those whose weight is tied to another module.
        dtype: in which a haar or gaussian P is held: that of the matrix products.

    Returns:
        Names of layers that were chosen but stay dense, because ``rank`` is not below their input width.

    Raises:
        ValueError: a rank that is no positive integer, a pattern that matches no linear layer, a tied weight, a weight
            of a type that steps cannot be merged into.
    """
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise ValueError(f"rank={rank!r} must be a whole number from 1. Set for example 128, or null for in / 4.")
    chosen = _choose(model, layers)
    left_dense = []
    for members in _groups_of(model, chosen):
        width = chosen[members[0]].in_features
        r = -(-width // 4) if rank is None else rank
        if r >= width:
            left_dense += members
            continue
        shared = Projection(projection, width, r, chosen[members[0]].weight.device, dtype)
        for name in members:
            _convert_layer(chosen[name], name, shared)
    return left_dense


def groups(model: nn.Module) -> list[Group]:
    """The projected layers of a converted model, by shared P, in the model's order. Wrapping does not change them."""
    found: dict[int, Group] = {}
    for module in model.modules():
        if isinstance(module, SubspaceLinear):
            group = found.setdefault(id(module.projection), Group(module.full_name, {}))
            group.layers[module.full_name] = module
    return list(found.values())


def is_subspace(name: str) -> bool:
    """Whether a parameter of this name is B of a projected layer: 0, and no part of a checkpoint."""
    return name.rpartition(".")[2] == B_NAME


def together(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The outputs of linear layers that read one input; projected ones of one P keep one A for all."""
    projected = [layer for layer in layers if isinstance(layer, SubspaceLinear)]
    if len(projected) == len(layers) and len({id(layer.projection) for layer in projected}) == 1:
        return SubspaceLinear.together(x, projected)
    return tuple(layer(x) for layer in layers)


def _convert_layer(layer: nn.Linear, name: str, projection: Projection) -> None:
    if layer.weight.dtype not in MERGEABLE:
        raise ValueError(f"{name}.weight is {layer.weight.dtype}. Steps are merged into fp32, fp64 or bf16 weights.")
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
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{name}.{key}")
    tied = {name for name, linear in linears.items() if len(owners[id(linear.weight)]) > 1}
    if not patterns:
        return {name: linear for name, linear in linears.items() if name not in tied and name not in HEAD_NAMES}
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
    if wrong := sorted(names & tied):
        both = " and ".join(owners[id(linears[wrong[0]].weight)])
        raise ValueError(f"{both} are one tied weight, which cannot be projected. Leave {wrong[0]} out.")
    return {name: linear for name, linear in linears.items() if name in names}


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
