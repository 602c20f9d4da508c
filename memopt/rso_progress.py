"""How far training has come in the present subspace of RSO: the norm of the gradient of B, and some of the B."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from memopt import layout

WINDOW = 20
"""Steps over which progress is judged."""
SMOOTHING = 0.9
"""Of the running average of the norm."""


class Progress:
    """The norm of the gradient of all B, step by step.

    ``numbers`` (4,) fp64 on the CPU, equal on all ranks: the norm at the first step in the subspace, its running
    average, that average ``WINDOW`` steps ago, and the steps since then. They are saved, since ``stall`` decides by
    them. Without ``stall`` the norm is added up over ranks only when it is asked for.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], stall: float | None) -> None:
        self._parameters, self._stall = parameters, stall
        self._meshes = {id(mesh): mesh for mesh in map(_mesh, parameters)}
        self.numbers = torch.zeros(4, dtype=torch.float64)
        self._squares = torch.zeros((), dtype=torch.float64)
        self._stalled = False

    def measure(self) -> None:
        """Take the norm of this step's gradient. Collective with ``stall``."""
        grads = [layout.owned_rows(p.grad) for p in self._parameters if p.grad is not None]
        if not grads:
            return
        self._squares = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        if self._stall is not None:
            self._follow(self._norm())

    def has_stalled(self) -> bool:
        """Whether over the last ``WINDOW`` steps the average has fallen by less than the share ``stall``."""
        return self._stalled

    def restart(self) -> None:
        """A new subspace begins."""
        self.numbers.zero_()
        self._stalled = False

    def gauges(self) -> dict[str, float | None]:
        """``subspace_gradient_norm`` of the last step; ``subspace_progress``, None without ``stall``. Collective."""
        first, average = self.numbers[:2].tolist()
        progress = 1.0 - average / first if first else None
        return {"subspace_gradient_norm": self._norm(), "subspace_progress": progress}

    def _norm(self) -> float:
        (mesh,) = self._meshes.values()
        return math.sqrt(layout.sum_over_owners(self._squares.clone(), mesh).item())

    def _follow(self, norm: float) -> None:
        first, average, before, steps = self.numbers.tolist()
        if not first:
            first = average = before = norm
        average = SMOOTHING * average + (1.0 - SMOOTHING) * norm
        steps += 1
        if steps >= WINDOW:
            assert self._stall is not None
            self._stalled = average > (1.0 - self._stall) * before
            before, steps = average, 0
        self.numbers.copy_(torch.tensor([first, average, before, steps], dtype=torch.float64))


class Values:
    """B of some layers as it would be without merging: the sum of their steps in the present subspace.

    ``state``: name -> (out, r), as the parameter B, sharded over all ranks like every state.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._before: float | None = None
        self.state = {name: layout.as_state(_zeros(layout.owned_rows(b.detach())), b) for name, b in parameters.items()}

    def add_to_gradients(self, weight: float) -> None:
        """grad B <- grad B + weight * B: the gradient of the proximal term."""
        for name, b in self._parameters.items():
            if b.grad is not None:
                layout.owned_rows(b.grad).add_(layout.local_rows(self.state[name]), alpha=weight)

    def add_steps(self, steps: Mapping[str, nn.Parameter]) -> None:
        """Add this step of B, which the parameters hold."""
        for name, value in self.state.items():
            if name in steps:
                layout.local_rows(value).add_(layout.owned_rows(steps[name].detach()))

    def restart(self) -> None:
        """A new subspace begins. Collective."""
        self._before = self.effective_rank()
        for value in self.state.values():
            layout.local_rows(value).zero_()

    def nbytes(self) -> int:
        """Bytes on this rank."""
        return sum(layout.local_rows(value).nbytes for value in self.state.values())

    def effective_rank(self) -> float | None:
        """exp of the entropy of the normalised squared singular values, over r; mean over layers. Collective.

        Before the first step in a subspace that of the subspace before; None where there was none.
        """
        shares = []
        for name, value in self.state.items():
            rows = layout.local_rows(value).double()
            gram = layout.sum_over_owners(rows.t() @ rows, _mesh(self._parameters[name]))
            found = torch.linalg.eigvalsh(gram).clamp(min=0)
            if (total := found.sum()) > 0:
                share = (found / total)[found > 0]
                shares.append(math.exp(-(share * share.log()).sum().item()) / len(gram))
        return sum(shares) / len(shares) if shares else self._before


def _zeros(rows: Tensor) -> Tensor:
    return torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)


def _mesh(parameter: Tensor) -> "torch.distributed.device_mesh.DeviceMesh | None":
    return getattr(parameter, "device_mesh", None)
