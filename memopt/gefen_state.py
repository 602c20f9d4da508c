"""What Gefen keeps for one parameter: which tensors, of which shapes, and how saved ones get into them.

Legend: R rows of the whole parameter (dimension 0), C entries a row, p the period, B = C / p blocks a row.

| parameter | state | shape, type |
| --- | --- | --- |
| matrix, 8-bit momentum | ``codes`` | (R, C) uint8 |
| | ``scale`` | (R, B) fp32 |
| matrix, fp32 momentum | ``momentum`` | (R, C) fp32 |
| every matrix | ``v`` | (R, B) fp32 |
| | ``period`` | () int64: p; 0 until the first gradient that is not zero decides it |
| factored second moment | ``column`` | (C,) fp32, the same on all ranks |
| vector, scalar | ``m``, ``v`` | as the parameter, fp32 |
| every parameter | ``step`` | () int64 |

Tensors with rows are sharded by ``memopt.layout``; ``step`` and ``period`` live on the CPU, so that reading them does
not wait for a device.
"""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from kernels.gefen import Matrix
from memopt import layout, partition
from memopt.gefen_options import GefenOptions


@dataclass(eq=False)
class Entry:
    """One parameter of the optimizer with its state."""

    parameter: Tensor
    """What the user trains: a plain tensor or a DTensor."""
    name: str
    factored: bool
    coded: bool
    """Whether the momentum of a matrix is kept in 8 bits."""
    replicas: DeviceMesh | None = None
    """Ranks that hold copies of plain parameters and share out their state; None where each keeps all."""
    state: dict[str, Any] = field(default_factory=dict)
    """Name -> tensor, as the optimizer's ``state`` shows it; empty until it is allocated."""
    installed: list[Any] = field(default_factory=list)
    """The values of ``state`` when ``local`` was read from them."""
    local: dict[str, Tensor] = field(default_factory=dict)
    """The rows of ``state`` that this rank owns."""
    step: int = 0
    period: int = 0
    """0 while it is undecided; ``v`` and ``scale`` then have one block a row."""

    @property
    def placed(self) -> Tensor:
        """The parameter with its placement: a DTensor on the same storage where ``replicas`` share a plain one."""
        # a scalar has no rows to share out
        if self.replicas is None or isinstance(self.parameter, DTensor) or not self.parameter.ndim:
            return self.parameter
        return layout.as_replicated(self.parameter, self.replicas)

    @property
    def device(self) -> torch.device:
        """Where parameter and state are."""
        return self.parameter.device

    @property
    def is_matrix(self) -> bool:
        """Whether there is a row to share a second moment over."""
        return self.parameter.ndim >= 2

    @property
    def rows(self) -> int:
        """Rows of the whole parameter."""
        return self.parameter.shape[0] if self.parameter.ndim else 1

    @property
    def columns(self) -> int:
        """Entries of a row."""
        return math.prod(self.parameter.shape[1:])

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that the rows are sharded over; None where this process owns all."""
        placed = self.placed
        return placed.device_mesh if isinstance(placed, DTensor) else None

    @functools.cached_property
    def _is_alone(self) -> bool:
        """Whether the parameter is a plain tensor that nobody shares; the way without DTensors is much faster."""
        return self.replicas is None and not isinstance(self.parameter, DTensor)

    def owned(self) -> Tensor:
        """This rank's rows of the parameter, contiguous: (rows, C), a vector's (n,); a view where that is possible."""
        if self._is_alone:
            return self.flat(self.parameter.detach()).contiguous()
        return self.flat(layout.owned_rows(self.placed.detach())).contiguous()

    def store(self, owned: Tensor) -> None:
        """Write ``owned`` back into the parameter, if it is not a view of it."""
        rows = self.parameter.detach() if self._is_alone else layout.owned_rows(self.placed.detach())
        if rows.data_ptr() != owned.data_ptr():
            rows.copy_(owned.view(rows.shape))

    def as_matrix(self, param: Tensor, grad: Tensor | None, factors: tuple[Tensor | None, Tensor | None]) -> Matrix:
        """What a kernel works on; ``grad`` None stands for one of the parameter's type."""
        state = self.local
        return Matrix(
            param=param,
            grad=param if grad is None else grad,
            v=state["v"],
            codes=state.get("codes"),
            scale=state.get("scale"),
            momentum=state.get("momentum"),
            factor=factors[0],
            inverse=factors[1],
        )

    @property
    def has_sparse_gradient(self) -> bool:
        """Whether there is a gradient that is no dense tensor."""
        grad = self.parameter.grad
        return grad is not None and grad.layout is not torch.strided

    def owned_gradient(self) -> Tensor:
        """This rank's rows of the gradient, contiguous, shaped as ``owned``."""
        grad = self.parameter.grad
        assert grad is not None
        if self._is_alone and not isinstance(grad, DTensor):
            return self.flat(grad).contiguous()
        if not isinstance(grad, DTensor):
            return self.flat(layout.owned_part(grad, self.placed)).contiguous()
        if isinstance(self.parameter, DTensor) and grad.placements != self.parameter.placements:
            # a sum that is still to be made, for example
            grad = grad.redistribute(placements=self.parameter.placements)
        return self.flat(layout.owned_rows(grad)).contiguous()

    def flat(self, rows: Tensor) -> Tensor:
        """``rows`` as (rows, C) for a matrix, as (n,) for a vector or scalar."""
        if rows.ndim == 2 or (rows.ndim == 1 and not self.is_matrix):
            return rows
        return rows.reshape(len(rows), self.columns) if self.is_matrix else rows.reshape(-1)

    def shapes(self, period: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Global shape and type of each state tensor for ``period``, 0 meaning undecided."""
        scalar: tuple[tuple[int, ...], torch.dtype] = ((), torch.int64)
        if not self.is_matrix:
            shape = (self.rows,)
            return {"m": (shape, torch.float32), "v": (shape, torch.float32), "step": scalar}
        blocks = self.columns // period if period else min(1, self.columns)
        whole, block = (self.rows, self.columns), (self.rows, blocks)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.coded:
            found |= {"codes": (whole, torch.uint8), "scale": (block, torch.float32)}
        else:
            found |= {"momentum": (whole, torch.float32)}
        found |= {"v": (block, torch.float32), "period": scalar}
        if self.factored:
            found["column"] = ((self.columns,), torch.float32)
        return found | {"step": scalar}

    def alone(self) -> Matrix:
        """``as_matrix`` before there are gradient and factors, for what depends on types and shapes only."""
        columns = self.local.get("column")
        return self.as_matrix(self.owned(), None, (columns if self.coded else None, columns))

    def copied_bytes(self) -> int:
        """Bytes of the copies that ``owned`` and ``owned_gradient`` make of a parameter that is not contiguous."""
        rows = layout.owned_rows(self.placed.detach())
        return 0 if rows.is_contiguous() else 2 * rows.nbytes

    def known_period(self, rule: str, block: int | None) -> int:
        """The period that needs no gradient to be known; 0 if there is none."""
        if not self.is_matrix or not self.columns:
            return 0
        return partition.known_period(rule, self.columns, block) or 0

    def num_bytes(self) -> int:
        """Bytes of state on this rank without the codebook; an upper bound while the period is undecided."""
        held = sum(tensor.nbytes for tensor in self.local.values())
        if not self.is_matrix or self.period:
            return held
        smallest = next(
            (p for p in range(partition.SMALLEST_PERIOD, self.columns) if self.columns % p == 0), self.columns
        )
        blocks = len(self.local["v"]) * (self.columns // max(1, smallest))
        return held + 4 * (blocks - self.local["v"].numel()) * (2 if self.coded else 1)

    def allocate(self, period: int, *keys: str) -> dict[str, Tensor]:
        """Fresh state of zeros for ``period``, or of it ``keys`` as far as it has them, as ``state`` holds it."""
        owned, fresh = self.owned(), {}
        for key, (shape, dtype) in self.shapes(period).items():
            if keys and key not in keys:
                continue
            if key in ("step", "period"):
                fresh[key] = torch.zeros(shape, dtype=dtype, device="cpu")
            elif key == "column":
                fresh[key] = torch.zeros(shape, dtype=dtype, device=owned.device)
            else:
                rows = torch.zeros((len(owned), *shape[1:]), dtype=dtype, device=owned.device)
                fresh[key] = layout.as_state(rows, self.placed)
        return fresh

    def install(self, state: Mapping[str, Tensor]) -> None:
        """Take ``state`` as this parameter's, and read its counters."""
        self.state.update(state)
        self.installed = list(self.state.values())
        self.local = {key: layout.local_rows(self.state[key]) for key in self.shapes(self.period)}
        self.step = int(self.state["step"])
        if self.is_matrix:
            self.period = int(self.state["period"])

    def forget(self) -> None:
        """Give up all state, as before it was allocated."""
        self.state, self.installed, self.local, self.step, self.period = {}, [], {}, 0, 0

    def follow(self, state: dict[str, Any] | None) -> None:
        """Take up what has been done to ``state``, this parameter's entry of the optimizer's ``state``, from outside.

        Tensors may have been replaced (moved away and back), and all may have been deleted, which is a new start.
        """
        if not state:
            if self.state:
                self.forget()
        elif state is not self.state or not all(map(operator.is_, state.values(), self.installed)):
            self.state = state
            self.install({})

    def clear(self) -> None:
        """Moments and counter as before the first step; the period stays."""
        for key, value in self.local.items():
            if key != "period":
                value.zero_()
        self.step = 0

    def count_step(self) -> None:
        """One more step."""
        self.step += 1
        self.state["step"].fill_(self.step)

    def set_period(self, period: int) -> None:
        """Take another period, with second moments and scales of zeros (``gefen_learning.repartition`` fills them)."""
        fresh = self.allocate(period, "v", "scale")
        self.state["period"].fill_(period)
        self.install(fresh)

    def shaped_like(self, v_shape: tuple[int, ...], options: GefenOptions) -> dict[str, Tensor]:
        """State to load into where the saved ``v`` has ``v_shape``: live tensors, new ones if the period differs.

        Raises:
            ValueError: that period is not the one that ``options`` ask for.
        """
        state = {key: value for key, value in self.state.items() if key != "levels"}
        if not self.is_matrix or len(v_shape) != 2 or v_shape == tuple(state["v"].shape):
            return state
        blocks = v_shape[1]
        if not blocks or self.columns % blocks:
            # no period gives this: the comparison of shapes will say so
            return state
        self._check_period(self.columns // blocks, options)
        return state | self.allocate(self.columns // blocks, "v", "scale")

    def _check_period(self, period: int, options: GefenOptions) -> None:
        known = self.known_period(options.partition, options.block)
        if known and period and known != period:
            raise ValueError(
                f"the saved state of {self.name} has blocks of {period} entries, partition={options.partition} with "
                f"block={options.block} makes blocks of {known}. Set what it was made with."
            )

    def adopt(self, saved: Mapping[str, Any], options: GefenOptions) -> dict[str, Tensor]:
        """Copies of ``saved`` state laid out for this parameter; nothing live is touched.

        Values are DTensors, or plain tensors of the global shape on every rank; what this rank owns is cut out of
        them. Collective where DTensors are laid out otherwise than ours.

        Raises:
            ValueError: a tensor is missing, too much, or of another shape or type, or the period is not the one that
                ``options`` ask for.
        """
        period = int(saved["period"]) if self.is_matrix and "period" in saved else 0
        self._check_period(period, options)
        expected = self.shapes(period) if not period or self.columns % period == 0 else {}
        values = {key: value for key, value in saved.items() if key != "levels"}
        if problem := _misfit(expected, values):
            raise ValueError(
                f"the saved state of {self.name} {problem}. Load a state of the same parameters, made with the same "
                "second_moment and momentum."
            )
        device = self.owned().device
        adopted = {}
        for key, value in values.items():
            if key in ("step", "period"):
                adopted[key] = torch.as_tensor(value, dtype=torch.int64, device="cpu").clone()
            elif key == "column":
                adopted[key] = value.to(device, copy=True)
            else:
                rows = layout.owned_state(value, self.placed)
                adopted[key] = layout.as_state(rows.to(device, copy=True).contiguous(), self.placed)
        return adopted


def check_agreement(entries: Sequence[Entry], group: torch.distributed.ProcessGroup) -> None:
    """Raise ``ValueError`` on every rank unless all have dense gradients of the same parameters. Collective.

    Rows are gathered by their place among the parameters of a step: with others on another rank they would land in
    another parameter.
    """
    ranks = torch.distributed.get_world_size(group)
    if not entries or ranks == 1:
        return
    # a sparse gradient counts more than all ranks have
    held = [0 if e.parameter.grad is None else 1 + (ranks if e.has_sparse_gradient else 0) for e in entries]
    counts = torch.tensor(held, dtype=torch.int64, device=entries[0].device)
    torch.distributed.all_reduce(counts, group=group)
    for entry, count in zip(entries, counts.tolist(), strict=True):
        if count > ranks:
            raise ValueError(f"the gradient of {entry.name} is sparse. Gefen takes dense ones: set sparse=False.")
        if count not in (0, ranks):
            raise ValueError(
                f"{entry.name} has a gradient on {count} of {ranks} ranks. All ranks must use the same parameters in "
                "a step."
            )


def _misfit(expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]], values: Mapping[str, Any]) -> str | None:
    if missing := sorted(expected.keys() - values.keys()):
        return f"lacks {', '.join(missing)}"
    if extra := sorted(values.keys() - expected.keys()):
        return f"has {', '.join(extra)}, which this optimizer does not keep"
    for key, (shape, dtype) in expected.items():
        value = torch.as_tensor(values[key])
        if tuple(value.shape) != shape or value.dtype != dtype:
            return f"has {key} as {tuple(value.shape)} {value.dtype}, which must be {shape} {dtype}"
    return None
