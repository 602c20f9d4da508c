"""Every benchmark, one after the other: ``python -m bench.run``. Their results land in ``bench/results``."""

import subprocess
import sys

BENCHMARKS = ("throughput", "loader", "prepare", "checkpoint", "loss_memory")


def main() -> int:
    """Run all; 1 if one of them failed."""
    return max(subprocess.run([sys.executable, "-m", f"bench.{name}"]).returncode for name in BENCHMARKS)


if __name__ == "__main__":
    sys.exit(main() != 0)
