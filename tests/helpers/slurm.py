"""A real Slurm of two nodes, n1 and n2, on this machine; `python -m tests.helpers.slurm` for a shell.

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
#: Slurm looks for jobs that can start every minute by itself, and three seconds after a submission.
_AT_ONCE = "sched_interval=1,bf_interval=1,batch_sched_delay=0"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

#: https://slurm.schedmd.com/slurm.conf.html. A requeued job waits until the credentials of its last start
#: have expired (cred_expire, 120 s by default), and for the next turn of the scheduler.
_CONF = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
AuthInfo=cred_expire={cred_expire}
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
MaxArraySize=1001
MaxJobCount=5000
FirstJobId={first_job}
JobRequeue=1
SchedulerParameters={scheduler}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
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

    def state(self, job_id: object) -> str:
        """Returns the state of a job, such as RUNNING."""
        return self.job(job_id).get("JobState", "")

    def wait(self, job_id: object, *states: str, seconds: float = 60) -> str:
        """Waits until a job is in one of these states, by default any of its end, and returns the state."""
        ended = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        reached: str = eventually(lambda: (state := self.state(job_id)) in ended and state, seconds=seconds)
        return reached

    def set_node(self, name: str, state: str) -> None:
        """Gives a node a state: DOWN, DRAIN, RESUME."""
        self.run("scontrol", "update", f"NodeName={name}", f"State={state}", "Reason=test")

    def reset(self) -> None:
        """Ends all jobs and waits until both nodes are idle."""
        self.run("scancel", "--user", getpass.getuser(), check=False)
        eventually(self._is_back, seconds=60)

    def _is_back(self) -> bool:
        for name in NODES:
            state = self.run("sinfo", "-hN", "-n", name, "-o", "%T", check=False)
            if "down" in state or "drain" in state:
                self.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
        return self._is_idle()

    def _is_idle(self) -> bool:
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
def start(*, cpus: int = 4, cred_expire: int = 5, scheduler: str = _AT_ONCE) -> Iterator[Slurm]:
    """Starts a Slurm in a directory of its own, and ends it with all its jobs.

    Args:
        cpus: CPUs that each node says it has.
        cred_expire: Seconds that a requeued job waits, at least 5.
        scheduler: SchedulerParameters.
    """
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
            cpus=cpus,
            cred_expire=cred_expire,
            scheduler=scheduler,
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
    while not slurm._is_idle():
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
    if len(sys.argv) > 1:
        _supervise(Path(sys.argv[1]))
    else:
        with start() as running:
            print(f"export SLURM_CONF={running.environ['SLURM_CONF']}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                sys.stdin.read()
