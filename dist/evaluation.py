"""The held-out loss over all ranks."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dist import agree, parallel
from dist.reduce import global_sums


class Evaluation(NamedTuple):
    """``loss``: mean per token, None without tokens or where it was ``interrupted``."""

    loss: float | None
    interrupted: bool = False


def mean_loss(
    model: nn.Module, batches: Iterable[tuple[Tensor, ...]], device: torch.device, stops: Callable[[], bool]
) -> Evaluation:
    """Mean loss per token of all ranks' ``batches``; collective, with equally many batches on every rank.

    Args:
        model: returns the summed loss, fp32, of (tokens, labels, positions).
        batches: these three, (rows, seq_len) int64 each; a label below 0 is none.
        stops: whether this rank was asked to stop: asked after every batch, and one rank is enough.
    """
    summed = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    with parallel.evaluation(model):
        for tokens, labels, positions in batches:
            summed += model(tokens, labels, positions)
            count += (labels >= 0).sum()
            if agree.any_rank(stops()):
                return Evaluation(None, interrupted=True)
    total, seen = global_sums(summed, count)
    return Evaluation(total / seen if seen else None)
