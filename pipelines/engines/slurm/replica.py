"""Replica of a Slurm job: gives one task the environment of a replica of a custom job, and runs its program.

`python -m shardline.pipelines.engines.slurm.replica --pools chief=1,worker=2 --logs DIR -- COMMAND` is what
srun starts. The task's rank, in the order of the pools, is its place in the job. Its output goes to a log of
its own. Slurm sends signals to all processes of a step: this process waits for the program's end, and keeps
a record of it next to the log.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardline.components.runs.causes import exit_code
from shardline.components.runs.record import ReplicaRecord, ReplicaStart
from shardline.components.vertex.payload import PoolSpec
from shardline.components.vertex.pools import EMPTY_POOL
from shardline.pipelines.engines import custom_job
from shardline.pipelines.engines.custom_job import ROLES, CustomJob
from shardline.pipelines.engines.environment import PLATFORM_VARIABLES, own_environment
from shardline.trainer.base import files
from shardline.trainer.base.errors import ClusterError, PipelineError, ShardlineError
from shardline.trainer.cluster.cluster import SECRET_VARIABLE, read_cluster

#: Address in CLUSTER_SPEC of a task without others.
_ALONE = "localhost:2222"
_PR_SET_PDEATHSIG = 1
#: Signals that Slurm or its users send: the program gets them, too, and decides.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def write_job(job: CustomJob, path: Path) -> None:
    """Writes the pools of a job for the option --job; only the user can read the file."""
    content = {
        "worker_pool_specs": [pool.spec for pool in job.worker_pools],
        "base_output_directory": job.base_output_directory,
        "trial": job.trial,
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(content))


def _read_job(path: Path) -> CustomJob:
    content = files.read_json(path, PipelineError)
    pools = tuple(PoolSpec(spec) for spec in content.pop("worker_pool_specs"))
    return CustomJob(worker_pools=pools, **content)


def step_environment(environ: Mapping[str, str], first: int) -> dict[str, str]:
    """Returns the environment of a task as if all components of its job were one step of Slurm.

    Each component of a heterogeneous job is a step of its own, whose ranks begin with 0; `first` is the rank
    of its first task in the job. https://slurm.schedmd.com/heterogeneous_jobs.html#env_var
    """
    own = {name: value for name, value in environ.items() if name not in PLATFORM_VARIABLES}
    groups = range(int(environ.get("SLURM_HET_SIZE", 0)))
    if not groups:
        return own

    def all_of(name: str) -> list[str]:
        return [environ[f"{name}_HET_GROUP_{group}"] for group in groups]

    tasks = str(sum(map(int, all_of("SLURM_NTASKS"))))
    own.pop("SLURM_STEP_RESV_PORTS", None)
    return {
        **own,
        "SLURM_PROCID": str(first + int(environ["SLURM_PROCID"])),
        "SLURM_NTASKS": tasks,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": ",".join(all_of("SLURM_JOB_NODELIST")),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(all_of("SLURM_TASKS_PER_NODE")),
    }


def _resized(job: CustomJob, pools: str, tasks: int) -> CustomJob:
    """Returns a job with other numbers of replicas, "chief=1,worker=*"; * are all other tasks."""
    counts = dict(part.split("=") for part in pools.split(","))
    others = sum(int(count) for count in counts.values() if count != "*")
    sizes = {role: tasks - others if count == "*" else int(count) for role, count in counts.items()}
    specs = (
        {**pool.spec, "replica_count": sizes[role]} if sizes.get(role) else dict(EMPTY_POOL)
        for role, pool in zip(ROLES, job.worker_pools, strict=False)
    )
    return replace(job, worker_pools=tuple(map(PoolSpec, specs)))


def main() -> None:
    """Runs the program of one task; a mistake is one line and exit code 2, a missing command 127."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name if __spec__ else __name__}")
    parser.add_argument("--pools", required=True, help="replicas by role: chief=1,worker=2, or worker=*")
    parser.add_argument("--logs", required=True, type=Path, help="directory of the logs")
    parser.add_argument("--first", type=int, default=0, help="rank of the first task of this step in the job")
    parser.add_argument("--job", type=Path, help="file with the pools, in place of COMMAND")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    try:
        environ = step_environment(os.environ, options.first)
        cluster = read_cluster(environ)
        hosts = cluster.hosts or (_ALONE,)
        if options.job:
            job = _read_job(options.job)
        else:
            job = CustomJob((PoolSpec.running(options.command),) * len(ROLES))
        job = _resized(job, options.pools, len(hosts))
        members = custom_job.replicas(job)
        if len(members) != len(hosts):
            raise ClusterError(
                f"Slurm has started {len(hosts)} tasks, and the job has {len(members)} replicas"
            )
        member = members[cluster.task_index]
    except ShardlineError as error:
        print(error.line, file=sys.stderr)
        sys.exit(error.exit_code)
    ids = (os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID"))
    job_id = "_".join(filter(None, ids)) or os.environ.get("SLURM_JOB_ID", "")
    env = {
        **own_environment(options.logs, custom_job.variables(job.worker_pools[member.pool])),
        **custom_job.environment(job, member, hosts, job_id),
        SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE, ""),
    }
    run(job.worker_pools[member.pool].argv, env, options.logs / f"{member.name}.log")


def run(command: list[str], env: dict[str, str], log: Path) -> None:
    """Runs a command with its output at the end of a log and records it; exits as a shell would."""
    log.parent.mkdir(parents=True, exist_ok=True)
    record = log.with_suffix(".json")
    earlier = ReplicaRecord.read(record).starts if record.is_file() else ()
    start, asked = ReplicaStart(start_s=time.time()), list[int]()

    def write(start: ReplicaStart) -> None:
        ReplicaRecord(log.stem, len(earlier), (*earlier, start)).write(log.parent)

    write(start)
    with log.open("a") as file:
        if shutil.which(command[0], path=env["PATH"]) is None:
            where = f"there is no command {command[0]!r} on {os.uname().nodename}"
            print(f"{log.stem} cannot be started: {where}", file=file)
            code = 127
        else:
            libc = ctypes.CDLL(None)
            program = subprocess.Popen(
                command,
                env=env,
                stdout=file,
                stderr=file,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
            for signum in _SIGNALS:
                signal.signal(signum, lambda signum, frame: asked.append(signum))
            code = program.wait()
    write(
        replace(
            start,
            end_s=time.time(),
            exit=signal.Signals(-code).name if code < 0 else code,
            # The program may have ended by the signal before this process has it.
            stopped=signal.SIGTERM in asked or exit_code(code) == 128 + signal.SIGTERM,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        )
    )
    os._exit(exit_code(code))  # as Python ends, it takes back the handlers of signals


if __name__ == "__main__":
    main()
