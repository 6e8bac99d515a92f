"""A real Slurm of two nodes, n1 and n2, on this machine.

It needs slurmctld, slurmd and slurm-client of the distribution; no munge, cgroups, systemd or accounting.
Both nodes are this host, by loopback, and their names are in no DNS. A process of its own starts the
daemons, and at the end of its standard input ends them with all that jobs have left: also when its owner
was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.helpers.jobs import eventually
from tests.helpers.replicas import ROOT, free_ports

NODES = ("n1", "n2")
_DAEMONS = ("slurmctld", "slurmd", "sbatch")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

#: https://slurm.schedmd.com/slurm.conf.html. A requeued job waits until the credentials of its last start
#: have expired (cred_expire, 120 s by default), and for the next turn of the scheduler (a minute by default).
_CONF = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=1
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
MinJobAge=300
FirstJobId={first_job}
JobRequeue=1
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def unavailable() -> str:
    """Returns why no Slurm can be started here, "" if one can."""
    missing = [name for name in _DAEMONS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurmctld slurmd slurm-client"
    return "" if os.geteuid() == 0 else "only root starts slurmd's tasks"


@dataclass(frozen=True)
class Slurm:
    """A running Slurm.

    Attributes:
        directory: What it writes, with slurm.conf; log/ has the daemons' logs.
        environ: What a process needs besides its own environment to reach it.
    """

    directory: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    def run(self, *command: object, check: bool = True) -> str:
        """Runs a command of Slurm and returns its output."""
        done = subprocess.run(
            list(map(str, command)), env={**os.environ, **self.environ}, capture_output=True, text=True
        )
        if check and done.returncode:
            raise AssertionError(f"{command} failed: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def job(self, job_id: object) -> dict[str, str]:
        """Returns what `scontrol show job` says of one job, by its words; empty when it is forgotten."""
        text = self.run("scontrol", "--oneliner", "show", "job", job_id, check=False)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait(self, job_id: object, seconds: float) -> str:
        """Waits until a job has ended, and returns its state, such as COMPLETED."""
        going = ("", "PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

        def reached() -> str:
            state = self.job(job_id).get("JobState", "")
            return "" if state in going else state

        return str(eventually(reached, seconds=seconds))

    def reset(self) -> None:
        """Ends all jobs and waits until both nodes are idle."""
        self.run("scancel", "--user", getpass.getuser(), check=False)
        eventually(self.is_idle, seconds=60)

    def is_idle(self) -> bool:
        """Whether both nodes are idle, and there is no job."""
        idle = self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False) == str(len(NODES))
        return idle and not self.run("squeue", "-h", check=False)


@contextlib.contextmanager
def _first_job() -> Iterator[int]:
    """Yields the id of the first job, by which the ports of jobs differ from those of other Slurms here."""
    for number in range(1, 9):
        path = Path(tempfile.gettempdir(), f"shardline-slurm-{number}.lock")
        with path.open("w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield 40 * number
            return
    raise AssertionError("eight Slurms for tests run on this machine already")


@contextlib.contextmanager
def start() -> Iterator[Slurm]:
    """Starts a Slurm in a directory of its own, and ends it with all its jobs."""
    with _first_job() as first_job:
        directory = Path(tempfile.mkdtemp(prefix="slurm-"))
        for name in ("state", "log", *(f"spool-{node}" for node in NODES)):
            (directory / name).mkdir()
        conf = directory / "slurm.conf"
        text = _CONF.format(
            host=socket.gethostname().partition(".")[0],
            ports=free_ports(1 + len(NODES)),
            user=getpass.getuser(),
            directory=directory,
            first_job=first_job,
        )
        conf.write_text(text)
        slurm = Slurm(directory, {"SLURM_CONF": str(conf)})
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.slurm", str(directory)],
            stdin=subprocess.PIPE,
            env={**os.environ, **slurm.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
        )
        try:
            _wait_for_nodes(slurm, supervisor)
            yield slurm
        finally:
            assert supervisor.stdin is not None
            supervisor.stdin.close()
            supervisor.wait(timeout=60)


def _wait_for_nodes(slurm: Slurm, supervisor: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not slurm.is_idle():
        if supervisor.poll() is not None or time.monotonic() > deadline:
            logs = [path.read_text()[-2000:] for path in sorted((slurm.directory / "log").glob("*"))]
            raise AssertionError("Slurm has no two idle nodes:\n" + "\n".join(logs))
        time.sleep(0.1)


def _supervise(directory: Path) -> None:
    """Runs the daemons until standard input ends, then ends all that they have started."""
    libc = ctypes.CDLL(None)
    # Orphans of the daemons and of their jobs become children of this process.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    commands = [("slurmctld", "-D", "-c"), *(("slurmd", "-D", "-c", "-N", node) for node in NODES)]
    for command in commands:
        with (directory / "log" / f"{'-'.join(command)}.out").open("w") as log:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
    sys.stdin.buffer.read()
    me = psutil.Process()
    while children := me.children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=5)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _supervise(Path(sys.argv[1]))
