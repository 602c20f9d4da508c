"""Memory of this process and of its device, as the operating system and the allocator report it, in bytes."""

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def memory_usage(device: torch.device) -> dict[str, int | None]:
    """Bytes in use now and at their highest since the process started; ``None`` where it is not known.

    ``process_now`` and ``process_peak`` are the resident set. ``device_allocated`` and ``device_reserved`` are what
    the CUDA allocator has handed out and what it holds, each with its peak, which is that of the last step where
    ``microbatch=auto`` looks for it; ``None`` on a CPU.
    """
    now, peak = _resident_set()
    usage: dict[str, int | None] = {"process_now": now, "process_peak": peak}
    on_cuda = device.type == "cuda"
    usage["device_allocated"] = torch.cuda.memory_allocated(device) if on_cuda else None
    usage["device_reserved"] = torch.cuda.memory_reserved(device) if on_cuda else None
    usage["device_peak_allocated"] = torch.cuda.max_memory_allocated(device) if on_cuda else None
    usage["device_peak_reserved"] = torch.cuda.max_memory_reserved(device) if on_cuda else None
    return usage


def headline(usage: dict[str, int | None]) -> int | None:
    """The one number a table shows: the device's peak where there is a device, else the process's."""
    peak = usage.get("device_peak_reserved")
    return usage.get("process_peak") if peak is None else peak


def _resident_set() -> tuple[int | None, int | None]:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        # getrusage counts in KiB, on macOS in bytes, and does not know the current size
        return None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    # VmHWM rather than getrusage: the latter keeps the peak of the program that this process was started from
    sizes = {
        key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines) if "kB" in value
    }
    return sizes.get("VmRSS"), sizes.get("VmHWM")
