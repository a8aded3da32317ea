"""A SLURM cluster of two nodes on one machine: a controller, two slurmd and a munge daemon. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.waiting import short_pause, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
NODES = ("n1", "n2")
ON_BOTH = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
ALLOCATED = ("salloc", "--quiet", *ON_BOTH)
_SECONDS = 30
_START_SECONDS = 20
_CONF = """
ClusterName=aptest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
JobRequeue=1
SchedulerType=sched/builtin
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Return why the cluster cannot run on this machine, or ""."""
    if os.geteuid() != 0:
        return "starting SLURM's daemons needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (make hosts-tools)" if missing else ""


@dataclass(frozen=True)
class Slurm:
    """A running cluster. ``environment``: the variables with which its programs find it."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str, seconds: float = _SECONDS, **options: object) -> subprocess.CompletedProcess[str]:
        """Run a program of SLURM, or a program that calls them."""
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            words,
            check=False,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=self.environment,
            **options,
        )

    def states(self) -> list[str]:
        """Return the states of the nodes, such as idle."""
        return self.run("sinfo", "-h", "-N", "-o", "%t").stdout.split()

    def state(self, job: str) -> str:
        """Return the state of a job with its exit code, as in "COMPLETED 0:0"."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner").stdout
        fields = dict(word.partition("=")[::2] for word in shown.split() if "=" in word)
        return f"{fields.get('JobState', 'UNKNOWN')} {fields.get('ExitCode', '')}"

    def wait(self, job: str, states: Sequence[str], seconds: float) -> str:
        """Wait for one of several states, and return it with the exit code."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            state = self.state(job)
            if state.split()[0] in states:
                return state
            short_pause(0.2)
        raise AssertionError(f"job {job} is {self.state(job)} after {seconds} s\n{self.logs()}")

    def logs(self) -> str:
        """Return the last lines of the daemons' logs."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start the daemons, yield the cluster once both nodes are idle, and end all of its processes."""
    for name in ("munge", "state", "spool/n1", "spool/n2"):
        (folder / name).mkdir(parents=True, mode=0o755)
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(host=socket.gethostname(), ports=_free_ports(3), folder=folder))
    environment = {**os.environ, "SLURM_CONF": str(conf), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    cluster = Slurm(folder, environment)
    daemons: list[subprocess.Popen[bytes]] = []
    with (folder / "daemons.log").open("wb") as log:
        try:
            key = folder / "munge" / "key"
            key.write_bytes(os.urandom(128))
            key.chmod(0o400)
            munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge/socket"]
            munged += [f"--{name}={folder}/munge/{name}" for name in ("pid-file", "log-file", "seed-file")]
            commands = [munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
            for command in commands:
                daemons.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )
                if command is munged:
                    wait_until((folder / "munge" / "socket").exists, _START_SECONDS, cluster.logs)
            wait_until(lambda: cluster.states() == ["idle"] * len(NODES), _START_SECONDS, cluster.logs)
            yield cluster
        finally:
            cluster.run("scancel", "--user=root", "--signal=KILL", "--full")
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                daemon.kill()
                daemon.wait(10)
            for process in left(folder):
                process.kill()


def left(folder: Path) -> list[psutil.Process]:
    """Return the remaining processes of a cluster, mostly slurmstepd of cancelled steps."""
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_CONF") == str(folder / "slurm.conf") and process.pid != os.getpid():
                alive.append(process)
    return alive
