"""The cluster that the tests of this folder share, and a run to submit to it."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs
from tests.tiny import ROOT, TINY


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes of two CPUs; a reason to skip where Slurm is not installed."""
    if missing := missing_programs():
        pytest.skip(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


class Jobs:
    """Submits ``slurm/train.sbatch`` with the tiny model."""

    def __init__(self, cluster: Cluster, folder: Path, tokens: Path) -> None:
        self.cluster, self.folder, self.run = cluster, folder, folder / "run"
        self.settings = [*TINY, "data=tokens", f"data.path={tokens}", f"run.dir={self.run}"]

    def submit(self, *overrides: str, options: tuple[str, ...] = ("--nodes=2",)) -> str:
        """The number of the job."""
        self.cluster.environment |= {"PYTHON": sys.executable, "LOGS": str(self.folder / "logs")}
        self.cluster.environment |= {"SHUTDOWN_SECONDS": "4", "RESTARTS": "1"}
        output = f"--output={self.folder}/job.out"
        return self.cluster.run(
            "sbatch", "--parsable", output, *options, "slurm/train.sbatch", *self.settings, *overrides, cwd=ROOT
        )

    def log(self) -> str:
        """What the job has printed."""
        path = self.folder / "job.out"
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path, tokens: Path) -> Iterator[Jobs]:
    """A folder for one job's files; jobs that a failed test leaves are cancelled."""
    yield Jobs(cluster, tmp_path, tokens)
    cluster.run("scancel", "--quiet", f"--user={cluster.user}")
    shutil.rmtree(tmp_path, ignore_errors=True)
