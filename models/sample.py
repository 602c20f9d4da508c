"""Text from a model: one token at a time, the same on every rank.

Decided here: the whole context is run again for every token (there is no key/value cache), which is enough for a
look at a run; a longer text keeps the last ``context`` tokens in view.
"""

from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from models.decoder import LanguageModel


@torch.no_grad()
def sample(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    context: int | None = None,
    vocab_size: int | None = None,
) -> list[int]:
    """``num_tokens`` token ids that continue ``prompt_ids`` (at least one), drawn with ``seed``.

    ``temperature`` 0 takes the likeliest token; ``top_k`` 0 draws from all. ``context`` is the number of tokens in
    view, by default all that the model was built for. Only ids below ``vocab_size`` are drawn, by default all that the
    head has rows for, which may be more than the tokenizer knows. A sharded model needs the call on every rank with
    the same arguments, and gives the same ids on every rank. Every module keeps its training mode, and torch's global
    random state is not touched. Raises ``ValueError``.
    """
    context = model.context if context is None else min(context, model.context)
    if not prompt_ids:
        raise ValueError("prompt_ids is empty: a model continues at least one token. Start with the begin marker.")
    if temperature < 0 or top_k < 0 or context < 1:
        raise ValueError(f"temperature={temperature}, top_k={top_k} and context={context} must be >= 0, >= 0 and >= 1.")
    device = next(model.parameters()).device
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for _ in range(num_tokens):
            view = torch.tensor([ids[-context:]], device=device)
            positions = torch.arange(view.shape[1], device=device)[None] if model.document_mask else None
            logits = model(view, positions=positions, last_only=True)[0, -1, :vocab_size].float().cpu()
            choice = _choose(logits, temperature, top_k, generator).to(device)
            if units:
                # equal logits are likely, not certain, where kernels differ between devices; a rank that went its
                # own way would hold the others up in the next gather
                torch.distributed.broadcast(choice, src=0)
            ids.append(int(choice))
    finally:
        for module, training in modes.items():
            module.training = training
        # fsdp frees the units it keeps gathered after a forward pass in the backward pass, which there is none of here
        for unit in units:
            unit.reshard()
    return ids[len(prompt_ids) :]


def _choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """One id (int64, shape (1,)) from ``logits`` (V,) fp32."""
    if temperature == 0:
        return logits.argmax().reshape(1)
    if top_k:
        smallest = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
