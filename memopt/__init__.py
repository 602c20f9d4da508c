"""Optimizers that save memory. ``from memopt import Gefen, RSO`` needs nothing of the trainer."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt.gefen import Gefen
    from memopt.rso import RSO

__all__ = ["RSO", "Gefen"]


def __getattr__(name: str) -> Any:
    # when they are asked for: Gefen imports numba, which takes a second and which other optimizers do without
    if name == "Gefen":
        from memopt.gefen import Gefen

        return Gefen
    if name == "RSO":
        from memopt.rso import RSO

        return RSO
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
