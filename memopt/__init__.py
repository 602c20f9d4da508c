"""Optimizers that save memory. ``from memopt import Gefen`` needs nothing of the trainer."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt.gefen import Gefen

__all__ = ["Gefen"]


def __getattr__(name: str) -> Any:
    # when it is asked for: it imports numba, which takes a second and which other optimizers do without
    if name == "Gefen":
        from memopt.gefen import Gefen

        return Gefen
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
