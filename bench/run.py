"""Every benchmark, one after the other: ``python -m bench.run``. Their results land in ``bench/results``."""

import subprocess
import sys

# bench.quality and bench.rso_quality take hours and bench.gpu_check a GPU: they are started by themselves
BENCHMARKS = (
    "throughput", "loader", "prepare", "checkpoint", "loss_memory", "gefen_state", "gefen_step", "codebook",
    "rso_memory", "rso_step",
)  # fmt: skip


def main() -> int:
    """Run all; 1 if one of them failed."""
    return max(subprocess.run([sys.executable, "-m", f"bench.{name}"]).returncode for name in BENCHMARKS)


if __name__ == "__main__":
    sys.exit(main() != 0)
