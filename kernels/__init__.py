"""Which implementation of the kernels runs: decided here and nowhere else.

A backend is a module with the functions of ``kernels.reference``. Those that need a compiler are imported when they are
first chosen.
"""

import functools
import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType

import torch

BACKENDS = ("auto", "reference", "numba", "triton")

# name -> module, and the kind of device it is for
_COMPILED = {"numba": ("kernels.cpu", "cpu"), "triton": ("kernels.cuda", "cuda")}
_DTYPES = {torch.float32, torch.bfloat16}


def choose(backend: str, device: torch.device, dtypes: Iterable[torch.dtype]) -> ModuleType:
    """The module whose functions work on matrices of these types on this device.

    Args:
        backend: one of ``BACKENDS``. ``auto`` takes numba on the CPU and triton on CUDA, and the reference where that
            one cannot run; any other is taken or refused.
        device: where the matrices are.
        dtypes: types of their parameters and gradients.

    Raises:
        ValueError: the backend does not exist, or cannot run there.
    """
    return _choose(backend, device.type, frozenset(dtypes))


@functools.cache
def _choose(backend: str, kind: str, dtypes: frozenset[torch.dtype]) -> ModuleType:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}. Set auto.")
    if backend == "auto":
        backend = next((name for name in _COMPILED if _problem(name, kind, dtypes) is None), "reference")
    if backend == "reference":
        return importlib.import_module("kernels.reference")
    if problem := _problem(backend, kind, dtypes):
        raise ValueError(f"backend={backend} {problem}. Set backend=auto or backend=reference.")
    return importlib.import_module(_COMPILED[backend][0])


def _problem(backend: str, kind: str, dtypes: frozenset[torch.dtype]) -> str | None:
    wanted = _COMPILED[backend][1]
    if kind != wanted:
        return f"runs on {wanted} only, and these parameters are on {kind}"
    if others := sorted(str(dtype).removeprefix("torch.") for dtype in dtypes - _DTYPES):
        return f"takes float32 and bfloat16 only, and these parameters or gradients are {', '.join(others)}"
    if importlib.util.find_spec(backend) is None:
        return f"needs the package {backend}, which is not installed"
    return None
