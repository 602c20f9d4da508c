"""Projections of RSO (Chen et al., arXiv 2502.07222): random matrices P whose columns span the subspace of a layer.

P (in, r) has E[P P^T] = I and, except for ``gaussian``, P^T P = (in / r) I exactly (their assumption; section 5):

* ``haar``: sqrt(in / r) times r columns of a random rotation: orthonormal columns by QR of a normal matrix.
* ``coordinate``: sqrt(in / r) times r different columns of the unit matrix. Kept as r indices: a product with P is a
  gather of columns, and a merge touches r columns of the weight.
* ``gaussian``: entries N(0, 1 / r); P^T P = (in / r) I holds on average only.

A P is never saved: (kind, seed, name, index) and ``SAMPLER_VERSION`` give the same one again. Random numbers come from
numpy's Philox generator on the CPU, whose values do not depend on the machine. The QR of ``haar`` may differ in the
last bits between machines, so that one rank computes it for all (``draw_all``).
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from memopt.rounding import round_stochastically

KINDS = ("haar", "coordinate", "gaussian")
SAMPLER_VERSION = 1
"""Raised whenever the same key gives another P; saved with the state of the optimizer."""


class Projection:
    """One P, for all layers that read one input. Its tensor keeps its address when it is drawn anew.

    Args:
        kind: one of ``KINDS``.
        width: ``in``, entries of the input.
        rank: r, at most ``width``.
        device: where the layers are.
        dtype: of the entries of a ``haar`` or ``gaussian`` P.
    """

    def __init__(
        self, kind: str, width: int, rank: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"projection={kind!r} is not one of {', '.join(KINDS)}.")
        if not 1 <= rank <= width:
            raise ValueError(f"rank={rank} must be from 1 to the {width} entries of the input.")
        self.kind, self.width, self.rank = kind, width, rank
        self.scale = math.sqrt(width / rank)
        shape, dtype = ((rank,), torch.int64) if kind == "coordinate" else ((width, rank), dtype)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        """(r,) int64 ascending column indices (``coordinate``), otherwise P itself (in, r)."""

    def move(self, device: torch.device) -> None:
        """Take memory on ``device``, where the layers have come to be; the values are to be drawn."""
        self.values = torch.zeros_like(self.values, device=device)

    def dense(self) -> Tensor:
        """P as a matrix (in, r), fp32."""
        if self.kind != "coordinate":
            return self.values.float()
        dense = torch.zeros(self.width, self.rank, device=self.values.device)
        places = (self.values, torch.arange(self.rank, device=dense.device))
        return dense.index_put_(places, dense.new_tensor(self.scale))

    def merge_(self, weight: Tensor, step: Tensor, keep: float = 1.0, generator: torch.Generator | None = None) -> None:
        """weight <- keep * weight + step P^T, in place: (rows, in) and (rows, r).

        A weight in bf16 is computed in fp32 and rounded: stochastically with a ``generator``, else to the nearest.
        """
        if weight.dtype != torch.bfloat16:
            self._merge(weight, step, keep)
            return
        # rows that take 16 MiB in fp32
        at_once = max(1, 2**22 // max(1, weight.shape[1]))
        for rows, part in zip(torch.split(weight, at_once), torch.split(step, at_once), strict=True):
            wide = rows.float()
            self._merge(wide, part, keep)
            rows.copy_(wide if generator is None else round_stochastically(wide, generator))

    def _merge(self, weight: Tensor, step: Tensor, keep: float) -> None:
        if self.kind == "coordinate":
            if keep != 1.0:
                weight.mul_(keep)
            # index_add_ along columns takes ten times as long
            weight.scatter_add_(1, self.values.expand_as(step), (step * self.scale).to(weight.dtype))
        else:
            weight.addmm_(step.to(weight.dtype), self.values.t().to(weight.dtype), beta=keep)

    def orthogonality_error(self) -> float:
        """Largest entry of |P^T P - (in / r) I| over in / r."""
        if self.kind == "coordinate":
            return 0.0 if len(set(self.values.tolist())) == self.rank else 1.0
        p = self.values.double()
        gram = p.t() @ p * (self.rank / self.width)
        return float((gram - torch.eye(self.rank, dtype=gram.dtype, device=gram.device)).abs().max())

    def nbytes(self) -> int:
        """Bytes that are held."""
        return self.values.nbytes


def project(x: Tensor, values: Tensor, scale: float) -> Tensor:
    """x P: (..., in) -> (..., r) in the type of ``x``; ``values`` and ``scale`` of a ``Projection``."""
    if values.dtype == torch.int64:
        # of more than two dimensions, index_select takes a path several times slower
        taken = x.reshape(-1, x.shape[-1]).index_select(1, values).mul_(scale)
        return taken.view(*x.shape[:-1], len(values))
    return x @ values.to(x.dtype)


def draw(kind: str, width: int, rank: int, seed: int, name: str, index: int) -> Tensor:
    """The tensor ``values`` of the P of (seed, name, index), on the CPU: fp32, or int64 column indices."""
    generator = _generator(kind, seed, name, index)
    if kind == "coordinate":
        # sorted: the gather then reads memory in order
        return torch.from_numpy(np.sort(generator.permutation(width)[:rank]).astype(np.int64))
    normal = torch.from_numpy(generator.standard_normal((width, rank)))
    if kind == "gaussian":
        return (normal / math.sqrt(rank)).float()
    q, upper = torch.linalg.qr(normal)
    # the signs make it uniform over rotations (Mezzadri, arXiv math-ph/0609050)
    rotated: Tensor = q * torch.diagonal(upper).sign() * math.sqrt(width / rank)
    return rotated.float()


def draw_all(projections: Sequence[tuple[str, Projection]], seed: int, index: int) -> None:
    """Draw (name, P) pairs for outer ``index`` in place; collective if there is a default process group.

    A P that takes linear algebra is computed by one rank, another one for each in turn, and sent to the others.
    """
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    own = torch.distributed.get_rank() if ranks > 1 else 0
    for number, (name, projection) in enumerate(projections):
        drawn = projection.kind != "haar" or number % ranks == own
        if drawn:
            values = draw(projection.kind, projection.width, projection.rank, seed, name, index)
            projection.values.copy_(values)
    if ranks > 1:
        for number, (_, projection) in enumerate(projections):
            if projection.kind == "haar":
                torch.distributed.broadcast(projection.values, number % ranks)


def _generator(kind: str, seed: int, name: str, index: int) -> np.random.Generator:
    digest = np.frombuffer(hashlib.sha256(name.encode()).digest(), np.uint32)
    key = np.random.SeedSequence([SAMPLER_VERSION, KINDS.index(kind), seed, *digest.tolist(), index])
    return np.random.Generator(np.random.Philox(key))
