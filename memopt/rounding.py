"""Rounding to bf16 that is right on average, so that steps smaller than half a digit are not all lost.

A weight in bf16 has 8 bits: a step below 1/512 of it would round away every time. Rounded up with a probability equal
to the part that is cut off, the expected weight is the exact one (Gupta et al., arXiv 1502.02551).
"""

import torch
from torch import Tensor


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 -> bf16 of the same shape, up or down with the probabilities that make its mean ``x``.

    Values of bf16 stay what they are, and so do infinities and NaN. ``generator`` is on the device of ``x``.
    """
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    # a carry out of the lower half moves to the next number away from 0
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
