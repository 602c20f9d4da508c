"""torch's own optimizers with their state sharded over every data-parallel rank.

The update rule runs on plain tensors: views of the rows that this rank owns (``memopt.layout``). Outside, the state is
DTensors named ``<parameter>.<state>``. Every optimizer of the trainer follows the methods of ``StateOptimizer``.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memopt import layout


class StateOptimizer(Protocol):
    """What the trainer asks of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups in torch's form: ``params``, ``lr``, ``weight_decay``, ..."""
        ...

    def step(self) -> None:
        """Update the parameters from their gradients. May be collective."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""

    def init_state(self) -> None:
        """Allocate all state now, without changing a parameter, a step counter or the random state."""

    def reset(self, names: Collection[str]) -> None:
        """Set the state of the parameters of these names back to what it was before the first step, counters too."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Name -> live state tensor: DTensors, or plain tensors that are equal on all ranks. Loading writes into it."""

    def held_tensors(self) -> list[Tensor]:
        """What this rank holds for the rule beside ``state_tensors``: what can be made again, such as a P of RSO."""
        ...

    def loading(self, shapes: Mapping[str, Sequence[int]]) -> AbstractContextManager[dict[str, Tensor]]:
        """Tensors for a checkpoint to fill, named as ``state_tensors``; the state once the block ends well.

        ``shapes``: name -> global shape of every saved tensor, for rules whose state depends on what was seen.
        """
        ...

    def state_bytes(self) -> int:
        """Bytes of state that this rank holds, every tensor counted; an upper bound unless ``state_is_final``."""

    @property
    def state_is_final(self) -> bool:
        """Whether ``state_bytes`` is exact and stays as it is."""

    def transient_bytes(self) -> int:
        """Bytes that a step allocates beyond parameters, gradients and state, and frees again: an upper bound."""

    def periodic_bytes(self) -> int:
        """The same for the steps that do more: the first one, and those of a refresh or measurement."""

    def notes(self) -> list[dict[str, Any]]:
        """What the head of a log should say of this optimizer: one set of values a line."""
        ...

    def gauges(self) -> dict[str, float | None]:
        """What the rule reports of the steps since the last call, over all ranks. Collective."""


class ShardedOptimizer:
    """Run a ``torch.optim.Optimizer`` on the rows that this rank owns.

    Args:
        groups: parameter groups: ``{"named_parameters": {name: parameter}, **options}``. Parameters are plain tensors
            or DTensors placed (Shard(0),) or (Replicate, Shard(0)).
        inner: class of the rule, e.g. ``torch.optim.AdamW``.
        state_names: names of its per-element fp32 state, allocated as zeros.
        counts_steps: whether it keeps a ``step`` counter per parameter.
        options: its keyword arguments.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        inner: type[torch.optim.Optimizer],
        *,
        state_names: tuple[str, ...],
        counts_steps: bool,
        options: Mapping[str, Any],
    ) -> None:
        self._parameters: dict[str, Tensor] = {}
        self._owned: dict[str, nn.Parameter] = {}
        inner_groups = []
        for group in groups:
            named = group["named_parameters"]
            owned = {name: nn.Parameter(layout.owned_rows(parameter.detach())) for name, parameter in named.items()}
            self._parameters |= named
            self._owned |= owned
            rest = {key: value for key, value in group.items() if key != "named_parameters"}
            inner_groups.append({"params": list(owned.values()), **rest})
        self._inner = inner(inner_groups, **options)
        self._state_names = state_names
        self._counts_steps = counts_steps
        self._fused = bool(options.get("fused"))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self) -> None:
        self.init_state()
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            # B of a projected layer has memory during a step only
            self._owned[name].data = layout.owned_rows(parameter.detach())
            self._owned[name].grad = None if grad is None else layout.owned_rows(grad)
        self._inner.step()
        for owned in self._owned.values():
            owned.grad = None
        layout.gather_updates(list(self._parameters.values()))

    def init_state(self) -> None:
        for owned in self._owned.values():
            state = self._inner.state[owned]
            if self._counts_steps and "step" not in state:
                # on the device, as the fused kernels want it
                state["step"] = torch.zeros((), dtype=torch.float32, device=owned.device)
            for key in self._state_names:
                if key not in state:
                    state[key] = torch.zeros_like(owned, memory_format=torch.preserve_format)

    def reset(self, names: Collection[str]) -> None:
        for name in names:
            for value in self._inner.state[self._owned[name]].values():
                value.zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        self.init_state()
        tensors: dict[str, Tensor] = {}
        for name, owned in self._owned.items():
            state = self._inner.state[owned]
            for key in self._state_names:
                tensors[f"{name}.{key}"] = layout.as_state(state[key], self._parameters[name])
            if self._counts_steps:
                tensors[f"{name}.step"] = state["step"]
        return tensors

    def held_tensors(self) -> list[Tensor]:
        return []

    @contextmanager
    def loading(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, Tensor]]:
        yield self.state_tensors()

    def state_bytes(self) -> int:
        self.init_state()
        return sum(
            value.nbytes
            for state in self._inner.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )

    @property
    def state_is_final(self) -> bool:
        return True

    def transient_bytes(self) -> int:
        # the kernels of torch's rules work in place, foreach ones need a copy of every gradient
        foreach = 0 if self._fused else sum(owned.nbytes for owned in self._owned.values())
        return foreach + layout.gather_bytes(list(self._parameters.values()))

    def periodic_bytes(self) -> int:
        return self.transient_bytes()

    def notes(self) -> list[dict[str, Any]]:
        return []

    def gauges(self) -> dict[str, float | None]:
        return {}
