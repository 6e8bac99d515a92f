"""Script of a Slurm job; `rest` makes a request of the same options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardline.components.runs.slurm_job import EXIT_FILE, SLURM_LOG
from shardline.pipelines.engines.slurm import replica
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.cluster.cluster import SECRET_VARIABLE

#: Seconds in which a job gets nowhere: stopped so early, it would be at each start.
_EARLY_S = 20

#: The index of an array's element in a command: all that bash expands there.
ARRAY_INDEX = "$SLURM_ARRAY_TASK_ID"
#: Command and variables of a job's pools (`replica.write_job`), in its directory or that of an element.
POOLS_FILE = "pools.json"


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A job for Slurm.

    Attributes:
        directory: Directory, which all nodes see, for the script and the logs, one of each replica.
        tasks: Number of tasks by role, "chief", "worker", "ps" and "evaluator", in this order.
        command: Program and arguments of every task; () for those of the pools in POOLS_FILE.
        elements: Elements of a job array, each of which runs all tasks, in a directory of its own below
            `directory`; 0 for no array. The command may contain `ARRAY_INDEX`, from 0.
        after: Id of a job that must succeed first; "" for none.
    """

    name: str
    directory: Path
    tasks: Mapping[str, int] = field(default_factory=lambda: {"chief": 1})
    command: tuple[str, ...] = ()
    elements: int = 0
    after: str = ""


@dataclass(frozen=True)
class Component:
    """The tasks of one allocation, by role: all of a job, or a component of a heterogeneous one."""

    settings: SlurmSettings
    tasks: Mapping[str, int]

    @property
    def total(self) -> int:
        """Number of its tasks."""
        return sum(self.tasks.values())

    @property
    def is_elastic(self) -> bool:
        """Whether it has as many tasks as Slurm gives it nodes."""
        return "-" in self.settings.nodes and "worker" in self.tasks


def components(job: BatchJob, settings: SlurmSettings) -> list[Component]:
    """Returns the allocations of a job: chief and workers share one, unless they ask for different things."""
    found: list[Component] = []
    for role, number in job.tasks.items():
        own = settings.for_pool(role)
        if role == "worker" and own == found[0].settings:
            found[0] = Component(own, {**found[0].tasks, role: number})
        else:
            found.append(Component(own, {role: number}))
    if len(found) > 1 and job.elements:
        raise SettingsError(
            "Slurm has no arrays of heterogeneous jobs: leave out parameter servers and evaluator, and the "
            "tables of pools below [engine.slurm]"
        )
    if len(found) > 1 and any(component.is_elastic for component in found):
        raise SettingsError(
            f"nodes = {settings.nodes!r} leaves the number of workers open, which only a job of chief and "
            "workers can; write one number"
        )
    return found


def sbatch_options(job: BatchJob, component: Component) -> dict[str, str]:
    """Returns the options of sbatch for one component, without those that the settings have as lines."""
    settings = component.settings
    text = str(job.directory)
    if re.search(r"[\n\r\"'\\]", text):
        raise SettingsError(f"Slurm takes no directory with quotes, backslashes or line breaks: {text!r}")
    count = int(settings.nodes) if settings.nodes.isdecimal() else 0
    each, rest = divmod(component.total, count or 1)
    log = SLURM_LOG.replace(".", "-%a.") if job.elements else SLURM_LOG
    options = {
        "job-name": re.sub(r"[^\w.+-]+", "-", job.name, flags=re.ASCII)[:64] or "shardline",
        "output": f"{text.replace('%', '%%')}/{log}",
        "open-mode": "append",
        "requeue": "",
        "signal": f"TERM@{settings.grace}" if settings.grace else None,
        "array": f"0-{job.elements - 1}" if job.elements else None,
        "dependency": f"afterok:{job.after}" if job.after else None,
        "kill-on-invalid-dep": "yes" if job.after else None,
        "nodes": settings.nodes or None if component.total > 1 else None,
        # With a number of tasks Slurm would give an elastic job the least nodes.
        "ntasks": None if component.is_elastic else component.total,
        "ntasks-per-node": each if count and component.total > 1 and not rest else None,
    }
    own = ("partition", "account", "qos", "time", "cpus_per_task", "mem", "gres", "constraint")
    options |= {name.replace("_", "-"): getattr(settings, name) or None for name in own}
    return {name: str(value) for name, value in options.items() if value is not None}


def batch_script(job: BatchJob, settings: SlurmSettings) -> str:
    """Returns the script that sbatch takes; raises SettingsError when Slurm has no such job.

    https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/heterogeneous_jobs.html.
    """
    parts = components(job, settings)
    options: list[str] = []
    for part in parts:
        options += ["hetjob"] * bool(options)
        for name, value in sbatch_options(job, part).items():
            shown = f'"{value}"' if re.search(r"[^\w./:@%,=+-]", value) else value
            options.append(f"--{name}{'=' * bool(value)}{shown}")
        options += part.settings.options
    own, setup = parts[0].settings, []
    if own.modules:
        setup.append(f"module load {shlex.join(own.modules)} || finish 2")
    if own.venv:
        setup.append(f"source {shlex.quote(own.venv)}/bin/activate || finish 2")
    chief, *others = [_srun(job, parts, index) for index in range(len(parts))]
    servers = [f"  {command} &\n  others+=($!)" for command in others]
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in options),
        secret=SECRET_VARIABLE,
        directory=shlex.quote(str(job.directory)) + f"/{ARRAY_INDEX}" * bool(job.elements),
        exit=EXIT_FILE,
        setup="\n".join([*setup, *own.lines]),
        attempt="\n".join(
            [f"  {chief} &\n  chief=$! others=()", *servers, _FOLLOW] if servers else [f"  {chief}"]
        ),
        restarts=own.restarts,
        early=min(_EARLY_S, own.grace),
        # The id of an array is also that of one of its elements, and would requeue all.
        job=f"${{SLURM_ARRAY_JOB_ID}}_{ARRAY_INDEX}" if job.elements else "$SLURM_JOB_ID",
    )


_SCRIPT = """\
#!/bin/bash
{options}

export SLURM_EXPORT_ENV=ALL
# By it the tasks know each other; it is written to no disk.
export {secret}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
directory={directory}
mkdir -p "$directory" && rm -f "$directory/{exit}"
stopped=
trap stopped=1 TERM
finish() {{
  echo "$1" > "$directory/{exit}.new" && mv "$directory/{exit}.new" "$directory/{exit}"
  exit "$1"
}}
{setup}

attempt() {{
{attempt}
}}

for ((left = {restarts}; ; left--)); do
  attempt 2> "$directory/srun.err"
  code=$?
  cat "$directory/srun.err" >&2
  # The task that failed first decides: srun has ended the others.
  failure=$(grep -m 1 -E ': tasks? [0-9,-]+: ' "$directory/srun.err")
  [[ $code != 0 && $failure =~ "exit code "([0-9]+)$ ]] && code=${{BASH_REMATCH[1]}}
  [ -n "$stopped" ] && break
  case $code in
    0 | 2 | 126 | 127) break ;;  # done, a mistake, no such command
    75)  # asked to stop, as before the time limit: continues in another allocation
      if ((SECONDS >= {early})); then
        echo "asked to stop: requeued"
        scontrol requeue "{job}" && exit 75
      fi
      echo "asked to stop after $SECONDS s, so not requeued: is the time limit too short?"
      break ;;
  esac
  ((left > 0)) || break
  echo "exit code $code: all tasks start again"
done
finish "$code"
"""

#: The chief decides; what serves it does not end by itself, and a loss ends the attempt.
_FOLLOW = """\
  while kill -0 "$chief" 2>/dev/null; do
    for pid in "${others[@]}"; do
      kill -0 "$pid" 2>/dev/null && continue
      wait "$pid"; code=$?
      case $code in
        0 | 75 | 143) ;;
        *) kill "$chief" "${others[@]}" 2>/dev/null; wait; return "$code" ;;
      esac
    done
    sleep 1
  done
  wait "$chief"; code=$?
  kill "${others[@]}" 2>/dev/null; wait
  return "$code\""""


def _srun(job: BatchJob, parts: Sequence[Component], index: int) -> str:
    """Returns the command that starts the tasks of one component."""
    own = parts[index]
    srun = ["srun", "--kill-on-bad-exit=1", "--wait=0", "--input=none", "--distribution=block"]
    srun.append("--ntasks-per-node=1" if own.is_elastic else f"--ntasks={own.total}")
    if own.settings.cpus_per_task:  # since 22.05 a step does not take over the job's
        srun.append(f"--cpus-per-task={own.settings.cpus_per_task}")
    if len(parts) > 1:
        srun.append(f"--het-group={index}")
    counts = {**job.tasks, **({"worker": "*"} if own.is_elastic else {})}
    pools = ",".join(f"{role}={count}" for role, count in counts.items())
    wrapper = [shlex.join([own.settings.python, "-m", replica.__name__, "--pools", pools])]
    wrapper.append('--logs "$directory"')
    if first := sum(part.total for part in parts[:index]):
        wrapper.append(f"--first={first}")
    if not job.command:
        wrapper.append(f'--job="$directory/{POOLS_FILE}"')
    command = shlex.join(["--", *job.command]) if job.command else ""
    if job.elements:  # out of the quotes
        command = command.replace(ARRAY_INDEX, f"'\"{ARRAY_INDEX}\"'")
    lines = (srun, _container(job, own.settings), wrapper, [command])
    return " \\\n    ".join(filter(None, map(" ".join, lines)))


def _container(job: BatchJob, settings: SlurmSettings) -> list[str]:
    """Returns what starts a container: https://apptainer.org/docs/user/main, https://github.com/NVIDIA/pyxis."""
    if not settings.container:
        return []
    image, directory = shlex.quote(settings.container), shlex.quote(str(job.directory))
    if settings.container_runtime == "pyxis":
        mounts = f'{directory}:{directory},"$PWD":"$PWD"'
        return [f"--container-image={image}", f"--container-mounts={mounts}", '--container-workdir="$PWD"']
    gpus = ["--nv"] if "gpu" in settings.gres else []
    return ["apptainer", "exec", *gpus, "--bind", f'{directory},"$PWD"', "--pwd", '"$PWD"', image]
