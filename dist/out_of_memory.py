"""Memory that has run out: which errors mean it, what is written about it, what the next start reads of it.

With several ranks it cannot be mended where it happens, since the others are within a collective (their all-gather
waits, or meets a collective of another size). The rank that fails says so to all (``dist.ending``); every rank leaves
with ``RESTART_STATUS``, and the next start reads which microbatch failed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dist import run_folder
from dist.agree import AgreedError

RESTART_STATUS = 75
"""Exit status of a process that is to be started again, from the last checkpoint (EX_TEMPFAIL of sysexits.h)."""
FILE_NAME = "out_of_memory.json"
"""In the run folder: a list with one report for every time that memory has run out."""

# the words of allocators, in lower case: CUDA's and ROCm's, those of their libraries, of Metal, and torch's own on CPU
_WORDS = (
    r"\b(cuda|hip|xpu|mps|npu)( backend| error:?)?:? out of memory",
    r"cuda_error_out_of_memory|cudaerrormemoryallocation|hiperroroutofmemory",
    r"(cublas|cusolver|cusparse|cufft|hipblas|rocblas)_status_alloc_failed|cudnn_status_alloc_failed|cufft_alloc_failed",
    r"nccl.*out of memory|cuda failure (2 )?'out of memory'",
    r"defaultcpuallocator: (can't|not enough)|can't allocate memory: you tried to allocate|std::bad_alloc",
    r"failed to allocate .*(memory|bytes)|unable to allocate .*(memory|[kmg]ib)",
)
_PATTERN = re.compile("|".join(_WORDS), re.DOTALL)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, means that memory has run out.

    True for the classes that say so (``torch.OutOfMemoryError``, ``MemoryError``) and for a ``RuntimeError`` with the
    words of an allocator. A message that merely speaks of an error, or of memory, is none.
    """
    return any(
        isinstance(link, torch.OutOfMemoryError | MemoryError)
        or (isinstance(link, AgreedError) and link.kind in ("OutOfMemoryError", "MemoryError"))
        or (isinstance(link, RuntimeError) and _PATTERN.search(str(link).lower()) is not None)
        for link in _chain(error)
    )


def add_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Add ``report`` to the run folder's file, whole or not at all. Local: call it on one rank."""
    run_folder.write_whole(folder / FILE_NAME, json.dumps([*read_reports(folder), report], indent=1) + "\n")


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """What earlier starts have written, oldest first; none where memory has never run out."""
    try:
        reports: list[dict[str, Any]] = json.loads((folder / FILE_NAME).read_text())
    except FileNotFoundError:
        return []
    return reports


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        # not the context: an error raised while another was handled is an error of its own
        link = link.__cause__
