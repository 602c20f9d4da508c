"""Parameter names that do not depend on what a model is wrapped in.

Optimizer state, checkpoints and initial weights are all keyed by these names: a run with activation checkpointing or
torch.compile and one without must read each other's files.
"""

from torch import nn

_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "module"}
"""Names under which a wrapper keeps its module: activation checkpointing, torch.compile, FSDP1, DDP."""


def canonical_name(name: str) -> str:
    """``layers.0._checkpoint_wrapped_module.attention.wo.weight`` -> ``layers.0.attention.wo.weight``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name -> parameter, in the model's order. A tied parameter appears once, under its first name.

    Raises ``ValueError`` if two parameters would get one name.
    """
    result: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        canonical = canonical_name(name)
        if canonical in result:
            raise ValueError(f"two parameters are called {canonical} without their wrappers ({name} is the second).")
        result[canonical] = parameter
    return result
