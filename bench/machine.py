"""The machine and the versions behind a measurement, and where results are written."""

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "numpy", "numba", "triton", "sentencepiece", "tokenizers")


def describe_machine() -> dict[str, Any]:
    """CPU model, cores this process may use, versions and date; None where something cannot be known."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def write_result(name: str, content: dict[str, Any]) -> Path:
    """Write ``bench/results/<name>.json`` with the machine beside the content; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe_machine(), **content}, indent=2) + "\n", encoding="utf-8")
    return path


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
