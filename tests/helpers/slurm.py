"""A real Slurm of two nodes, n1 and n2, on this machine.

It needs slurmctld, slurmd and slurm-client of the distribution; no munge, cgroups, systemd or accounting.
Both nodes are this host, by loopback, and their names are in no DNS. The daemons end with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.jobs import eventually
from tests.helpers.replicas import free_ports

_DAEMONS = ("slurmctld", "slurmd", "sbatch")
_PR_SET_PDEATHSIG = 1

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
    """A running Slurm, with its slurm.conf."""

    conf: Path

    def run(self, *command: object, check: bool = True) -> str:
        """Runs a command of Slurm and returns its output."""
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
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
        idle = self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False) == "2"
        return idle and not self.run("squeue", "-h", check=False)


@contextlib.contextmanager
def start() -> Iterator[Slurm]:
    """Starts a Slurm in a directory of its own, and ends it with all its jobs."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        for part in ("state", "log", "spool-n1", "spool-n2"):
            (directory / part).mkdir()
        slurm = Slurm(directory / "slurm.conf")
        # By its number the ports of a job differ from those of other Slurms here.
        first_job = 40 * (1 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")))
        host, ports = socket.gethostname().partition(".")[0], free_ports(3)
        slurm.conf.write_text(
            _CONF.format(
                host=host, ports=ports, user=getpass.getuser(), directory=directory, first_job=first_job
            )
        )
        libc, daemons = ctypes.CDLL(None), []
        for command in ("slurmctld -D -c", "slurmd -D -c -N n1", "slurmd -D -c -N n2"):
            with (directory / "log" / f"{command}.out").open("w") as log:
                daemons.append(
                    subprocess.Popen(
                        command.split(),
                        env={**os.environ, "SLURM_CONF": str(slurm.conf)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
                    )
                )
        try:
            eventually(slurm.is_idle, seconds=60)
            yield slurm
            slurm.reset()
        finally:
            for daemon in daemons:
                daemon.kill()
                daemon.wait()
