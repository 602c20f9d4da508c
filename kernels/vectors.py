"""Adam's step for vectors and scalars (norms, biases), whose moments are kept whole in fp32.

All vectors of a call are one flat tensor for the time of the step: a model has hundreds of them, and each alone is too
small to be worth a launch. Every operation is elementwise and rounded by itself, so that a result does not depend on
which other entries are in the call. One implementation for every device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.gefen import Gauges, Rule


@torch.no_grad()
def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    rule: Rule,
    gauges: Gauges,
) -> None:
    """One step of AdamW (arXiv 1711.05101) in fp32 maths, in place.

    Args:
        params: fp32 or bf16 of any shapes; updated.
        grads: of the same shapes, floating. An entry that is not finite leaves its parameter and moments alone.
        first: fp32 of the same shapes, Adam's m; updated.
        second: fp32 of the same shapes, Adam's v; updated.
        rule: ``quantised_update`` has no meaning here.
        gauges: ``max_update`` is raised.
    """
    sizes = [param.numel() for param in params]
    if not sum(sizes):
        return
    g, p, m, v = (torch.cat([part.float().flatten() for part in parts]) for parts in (grads, params, first, second))
    number = rule.numbers()
    finite = g.isfinite()
    g = g.where(finite, 0.0)
    kept = ~finite
    new_m = m * number["beta1"] + g * number["gain1"]
    new_v = v * number["beta2"] + (g * g) * number["gain2"]
    # in fp64, as in kernels.reference
    root = (new_v * number["correction2"]).double().sqrt().float()
    update = (new_m * number["correction1"]) / (root + number["eps"])
    update = update.clamp(-number["max_update"], number["max_update"]).masked_fill(kept, 0.0)
    new_p = p * number["decay"] - update * number["lr"]
    for old, new, parts in ((p, new_p, params), (m, new_m, first), (v, new_v, second)):
        flat = torch.where(kept, old, new)
        torch._foreach_copy_([part.view(-1) for part in parts], list(torch.split(flat, sizes)))
    gauges.max_update.copy_(torch.maximum(gauges.max_update, update.abs().amax()))


def workspace_bytes(params: Sequence[Tensor]) -> int:
    """Bytes that ``adam_step`` allocates beyond its arguments, an upper bound."""
    # the four inputs, the three results and at most six temporaries of fp32 at a time
    return 13 * 4 * sum(param.numel() for param in params)
