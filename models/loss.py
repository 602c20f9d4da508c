"""The output head and its loss: logits exist for a chunk of tokens at a time, and gradients are made on the way.

Decided here: the loss is the SUM of the cross entropies (the trainer divides by the global number of real tokens), a
label of ``IGNORE`` does not count, and the loss is computed inside the head's own ``forward``, so that whatever wraps
the head (FSDP's gathers, its no-sync flag, a tied weight) sees one ordinary call of one module. The forward pass
already computes the gradients of hidden states and weight, chunk by chunk; backward only scales them. The head's GEMMs
are therefore run three times in all, as in a plain linear layer, and never again. ``bench/loss_memory.py`` measures
what that saves and costs. torch 2.13's own chunked ``linear_cross_entropy`` returns the sum in the type of its input,
in bf16 three digits of a loss; it can take this file's place once it returns fp32.

Legend: N tokens, D model width, V vocabulary, C tokens of one chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchtitan.models.common.linear import Linear

IGNORE = -100
"""The label of a position that has no target, as in ``torch.nn.functional.cross_entropy``."""


class LossHead(Linear):
    """The linear map to the vocabulary, with the loss when labels are given. No bias."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk: int
        """Tokens whose logits are held at a time when labels are given."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.chunk = config.chunk

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (..., V) of ``hidden`` (..., D), or, with ``labels`` (...) int64, the fp32 sum of cross entropies.

        The sum is over labels other than ``IGNORE``, and fp64 where the weight is.
        """
        if labels is None:
            return F.linear(hidden, self.weight)
        return summed_cross_entropy(hidden, self.weight, labels, self.chunk)


def summed_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Sum of the cross entropies of ``hidden @ weight.T``, whose N x V logits are never whole in memory.

    ``hidden`` (..., D) and ``weight`` (V, D) float, ``labels`` (...) int64 in [0, V) or ``IGNORE``; ``chunk`` tokens
    at a time. Returns a scalar, fp32 or, for fp64 weights, fp64. GEMMs run in the type of autocast where that is on,
    else in the common type of ``hidden`` and ``weight``; the softmax and all sums over chunks in at least fp32.
    Backward can run once; a second call raises ``RuntimeError``.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    else:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
    flat = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(device_type, enabled=False):
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return _SummedCrossEntropy.apply(flat, weight, labels.reshape(-1), chunk, dtype)
        return _sum_chunks(flat, weight, labels.reshape(-1), chunk, dtype, None, None)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        # every row of grad_hidden is written by its chunk; grad_weight is a sum over chunks
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = weight.new_zeros(weight.shape, dtype=_at_least_fp32(weight.dtype)) if needs_weight else None
        loss = _sum_chunks(hidden, weight, labels, chunk, dtype, grad_hidden, grad_weight)
        # attributes, not save_for_backward: backward scales them in place and gives them up, which saves a V x D copy
        ctx.grads = (grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if ctx.grads is None:
            raise RuntimeError(
                "backward through the loss head a second time: its gradients were handed over by the first. "
                "Run the model again for another backward."
            )
        grad_hidden, grad_weight = ctx.grads
        ctx.grads = None
        if grad_hidden is not None:
            grad_hidden.mul_(grad_output)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_output).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


def _sum_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    dtype: torch.dtype,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> Tensor:
    """Sum of the cross entropies; writes d sum / d hidden and adds d sum / d weight where a tensor is given.

    hidden (N, D); weight (V, D); labels (N,); grad_hidden (N, D) written in place; grad_weight (V, D), at least fp32,
    added to in place. GEMMs run in ``dtype``.
    """
    exact = _at_least_fp32(weight.dtype)
    weight = weight.to(dtype)
    loss = torch.zeros((), dtype=exact, device=hidden.device)
    # one buffer for all chunks, which everything below works in: fresh memory would cost a page fault per 4 KiB
    buffer = torch.empty(min(chunk, hidden.shape[0]), weight.shape[0], dtype=dtype, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        hidden_CD = hidden[rows].to(dtype)
        ignored = labels[rows].unsqueeze(1) == IGNORE
        target = labels[rows].unsqueeze(1).masked_fill(ignored, 0)
        logits_CV = torch.mm(hidden_CD, weight.t(), out=buffer[: hidden_CD.shape[0]]).to(exact)
        logits_CV.sub_(logits_CV.amax(1, keepdim=True))
        target_logit = logits_CV.gather(1, target)
        total = logits_CV.exp_().sum(1, keepdim=True)
        loss += (total.log() - target_logit).masked_fill_(ignored, 0).sum()
        if grad_hidden is None and grad_weight is None:
            continue
        # d loss / d logits = exp / total - one-hot, and 0 where ignored. the division and the mask are left to the
        # narrow factors of the two products, C x D instead of C x V
        scaled_CV = logits_CV.scatter_add_(1, target, -total).to(dtype)
        scale = total.reciprocal_().masked_fill_(ignored, 0)
        if grad_hidden is not None:
            grad_hidden[rows] = torch.mm(scaled_CV, weight).mul_(scale)
        if grad_weight is not None:
            hidden_CD = (hidden_CD * scale).to(dtype)
            if grad_weight.dtype == dtype:
                grad_weight.addmm_(scaled_CV.t(), hidden_CD)
            else:
                grad_weight += torch.mm(scaled_CV.t(), hidden_CD)
    return loss


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
