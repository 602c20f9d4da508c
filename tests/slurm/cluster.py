"""A real Slurm of two nodes on one machine: munged, slurmctld and two slurmd, all in one folder, ended with it."""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
# where Debian has the daemons, which the path of an ordinary user lacks
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=15
MessageTimeout=10
KillWait={kill_wait}
MinJobAge=600
OverTimeLimit=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 MaxTime=INFINITE
PartitionName=high Nodes=n1,n2 PriorityTier=2 MaxTime=INFINITE
"""


def missing_programs() -> list[str]:
    """What a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


class Cluster:
    """Two nodes of two CPUs. ``stop`` ends everything that was started, jobs included."""

    def __init__(self, folder: Path, kill_wait: int = 5) -> None:
        """Start it in ``folder``, which must be empty. Jobs have ``kill_wait`` seconds between SIGTERM and SIGKILL.

        Raises ``RuntimeError`` with the daemons' logs if the nodes are not idle after 30 s.
        """
        self.folder, self.user = folder, pwd.getpwuid(os.getuid()).pw_name
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": PATH,
            "OMP_NUM_THREADS": "1",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname(),
                user=self.user,
                folder=folder,
                ports=_free_ports(3),
                kill_wait=kill_wait,
            )
        )
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        try:
            files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            options = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
            self._start("munged", ["munged", "--foreground", "--force", "--num-threads=2", *options])
            wait_for(lambda: (folder / "munge.socket").exists(), 10, "munged")
            self._start("slurmctld", ["slurmctld", "-D", "-c"])
            for node in NODES:
                self.start_node(node)
            wait_for(lambda: self.node_states() == ["idle", "idle"], 30, "idle nodes")
        except BaseException as error:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("*.log")))
            self.stop()
            raise RuntimeError(f"Slurm did not start\n{logs}") from error

    def start_node(self, node: str) -> None:
        """Start the slurmd of ``node``."""
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._start(node, ["slurmd", "-D", "-N", node])

    def lose_node(self, node: str) -> None:
        """Kill the slurmd of ``node`` and all that runs under it, as if its power had failed."""
        self.daemons.pop(node).kill()
        # a step's daemon leaves the session of slurmd; its title names the job, not the node
        for process in _processes_with(f"SLURMD_NODENAME={node}\0", f"SLURM_CONF={self.folder}/slurm.conf\0"):
            _kill(process)

    def run(self, *command: str, **options: Any) -> str:
        """Standard output of a Slurm command; raises ``CalledProcessError``."""
        ended = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=True, **options
        )
        return ended.stdout.strip()

    def node_states(self) -> list[str]:
        """State of each node, as ``sinfo`` says it."""
        ended = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "low", "-o", "%T"], env=self.environment, capture_output=True, text=True
        )
        return ended.stdout.split()

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol show job`` says: ``JobState``, ``Restarts``, ``ExitCode``..."""
        words = self.run("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, number: str, states: tuple[str, ...], seconds: float) -> dict[str, str]:
        """The job once it is in one of ``states``; raises ``AssertionError`` after ``seconds``."""
        wait_for(lambda: self.job(number)["JobState"] in states, seconds, f"job {number} in {states}")
        return self.job(number)

    def stop(self) -> None:
        """End all jobs and daemons."""
        for name in reversed(self.daemons):
            self.daemons[name].terminate()
        for process in self.daemons.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # what a step's daemon or a job still runs
        for process in _processes_with(f"SLURM_CONF={self.folder}/slurm.conf\0"):
            _kill(process)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Return once ``condition()``; raises ``AssertionError`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _processes_with(*variables: str) -> list[int]:
    """Processes that were started with these environment variables, without this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(variable in environment for variable in variables) and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def _kill(process: int) -> None:
    try:
        os.kill(process, 9)
    except ProcessLookupError:
        pass
