"""Script of a Slurm job; `rest` makes a request of the same options."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardline.components.runs.slurm_job import EXIT_FILE, SLURM_LOG
from shardline.pipelines.engines.slurm import replica
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.pipelines.plain_secrets import secret_kind
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.cluster.cluster import SECRET_VARIABLE

#: Seconds in which a job gets nowhere: stopped so early, it would be at each start.
_EARLY_S = 20

#: The index of an array's element in a command, an argument or a directory: all that bash expands there.
ARRAY_INDEX = "$SLURM_ARRAY_TASK_ID"


@dataclass(frozen=True, kw_only=True)
class Step:
    """The tasks of one worker pool, which all run the same command.

    Attributes:
        role: "chief", "worker", "ps" or "evaluator".
        tasks: Their number.
        command: Program and arguments.
        env: Environment variables besides those of the job. A secret is left out of the script; tasks have
            it only where sbatch has it in its own environment.
    """

    role: str
    tasks: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A job for Slurm.

    Attributes:
        name: Name of the job.
        steps: The tasks by worker pool, the chief first.
        directory: Directory, which all nodes see, for the script and the logs, one of each replica.
        elements: Elements of a job array, each of which runs the steps; 0 for no array. A command, and
            `job_root`, may contain `ARRAY_INDEX`, from 0. Each has a directory of its own below `directory`.
        after: Id of a job that must succeed first; "" for none.
        job_root: Root of AIP_MODEL_DIR and its siblings; "" for none.
        job_file: File with command and variables of each pool (`replica.write_job`), in place of those of the
            steps; "" for none. It may contain `ARRAY_INDEX`.
    """

    name: str
    steps: tuple[Step, ...]
    directory: Path
    elements: int = 0
    after: str = ""
    job_root: str = ""
    job_file: str = ""


@dataclass(frozen=True)
class Component:
    """The steps of one allocation: the whole job, or a component of a heterogeneous one.

    Attributes:
        first: Rank of its first task among those of the job.
    """

    steps: tuple[Step, ...]
    settings: SlurmSettings
    first: int

    @property
    def tasks(self) -> int:
        """Number of its tasks."""
        return sum(step.tasks for step in self.steps)

    @property
    def is_elastic(self) -> bool:
        """Whether it has as many tasks as Slurm gives it nodes."""
        return "-" in self.settings.nodes and self.steps[-1].role == "worker"


def components(job: BatchJob, settings: SlurmSettings) -> list[Component]:
    """Returns the allocations of a job: chief and workers share one, unless they ask for different things."""
    found: list[Component] = []
    for step in job.steps:
        own = settings.for_pool(step.role)
        last = found[-1] if found else None
        if (
            last is not None
            and step.role == "worker"
            and own == last.settings
            and (job.job_file or (step.command, step.env) == (last.steps[0].command, last.steps[0].env))
        ):
            found[-1] = Component((*last.steps, step), own, last.first)
        else:
            found.append(Component((step,), own, last.first + last.tasks if last else 0))
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
    each, rest = divmod(component.tasks, count or 1)
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
        "nodes": settings.nodes or None if component.tasks > 1 else None,
        # With a number of tasks Slurm would give an elastic job the least nodes.
        "ntasks": None if component.is_elastic else component.tasks,
        "ntasks-per-node": each if count and component.tasks > 1 and not rest else None,
    }
    own = ("partition", "account", "qos", "time", "cpus_per_task", "mem", "gres", "constraint")
    options |= {name.replace("_", "-"): getattr(settings, name) or None for name in own}
    return {name: str(value) for name, value in options.items() if value is not None}


def batch_script(job: BatchJob, settings: SlurmSettings) -> str:
    """Returns the script that sbatch takes.

    https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/heterogeneous_jobs.html.

    Raises:
        SettingsError: When Slurm has no such job.
    """
    parts = components(job, settings)
    lines = ["#!/bin/bash"]
    for index, component in enumerate(parts):
        lines += ["#SBATCH hetjob"] * (index > 0)
        for name, value in sbatch_options(job, component).items():
            shown = f'"{value}"' if re.search(r"[^\w./:@%,=+-]", value) else value
            lines.append(f"#SBATCH --{name}{'=' * bool(value)}{shown}")
        lines += [f"#SBATCH {option}" for option in component.settings.options]
    return "\n".join([*lines, "", *_body(job, parts), ""])


def _body(job: BatchJob, parts: Sequence[Component]) -> Iterator[str]:
    """Yields the lines of the script that follow its options."""
    settings = parts[0].settings
    place = f"{job.directory}/{ARRAY_INDEX}" if job.elements else str(job.directory)
    yield _PREAMBLE.format(directory=_quote(place, job.elements), secret=SECRET_VARIABLE, exit=EXIT_FILE)
    if settings.modules:
        yield f"module load {shlex.join(settings.modules)} || finish 2"
    if settings.venv:
        yield f"source {_quote(settings.venv)}/bin/activate || finish 2"
    yield from settings.lines
    hidden = {name for step in job.steps for name, value in step.env.items() if secret_kind(name, value)}
    if hidden and not job.job_file:
        yield f"# Not written here, but taken from sbatch: {', '.join(map(repr, sorted(hidden)))}"
    yield "\nattempt() {"
    commands = [
        _srun(job, component, index if len(parts) > 1 else None) for index, component in enumerate(parts)
    ]
    if len(commands) == 1:
        yield f"  {commands[0]}"
    else:
        yield f"  {commands[0]} &\n  chief=$! others=()"
        yield from (f"  {command} &\n  others+=($!)" for command in commands[1:])
        yield _FOLLOW
    yield "}\n"
    # The id of an array is also that of one of its elements, and would requeue all.
    own = f"${{SLURM_ARRAY_JOB_ID}}_{ARRAY_INDEX}" if job.elements else "$SLURM_JOB_ID"
    yield _LOOP.format(job=own, restarts=settings.restarts, early=min(_EARLY_S, settings.grace))


_PREAMBLE = """\
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

_LOOP = """\
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
finish "$code\""""


def _srun(job: BatchJob, component: Component, group: int | None) -> str:
    """Returns the command that starts the tasks of one component."""
    settings = component.settings
    words = ["srun", "--kill-on-bad-exit=1", "--wait=0", "--input=none", "--distribution=block"]
    words.append("--ntasks-per-node=1" if component.is_elastic else f"--ntasks={component.tasks}")
    if settings.cpus_per_task:  # since 22.05 a step does not take over the job's
        words.append(f"--cpus-per-task={settings.cpus_per_task}")
    if group is not None:
        words.append(f"--het-group={group}")
    return " \\\n    ".join(
        " ".join(line)
        for line in (words, _container(job, settings), _wrapper(job, component), _command(job, component))
        if line
    )


def _container(job: BatchJob, settings: SlurmSettings) -> list[str]:
    """Returns what starts a container: https://apptainer.org/docs/user/main, https://github.com/NVIDIA/pyxis."""
    if not settings.container:
        return []
    image, directory = _quote(settings.container), _quote(str(job.directory))
    if settings.container_runtime == "pyxis":
        mounts = f'{directory}:{directory},"$PWD":"$PWD"'
        return [f"--container-image={image}", f"--container-mounts={mounts}", '--container-workdir="$PWD"']
    gpus = ["--nv"] if "gpu" in settings.gres else []
    return ["apptainer", "exec", *gpus, "--bind", f'{directory},"$PWD"', "--pwd", '"$PWD"', image]


def _wrapper(job: BatchJob, component: Component) -> list[str]:
    settings = component.settings
    python = "python" if settings.container or settings.venv else _quote(sys.executable)
    pools = [
        f"{step.role}={'*' if component.is_elastic and step.role == 'worker' else step.tasks}"
        for step in job.steps
    ]
    words = [python, "-m", replica.__name__, "--pools", _quote(",".join(pools)), "--logs", '"$directory"']
    options = {"first": str(component.first or ""), "job-root": job.job_root, "job": job.job_file}
    words += [f"--{name}={_quote(value, job.elements)}" for name, value in options.items() if value]
    if job.job_file:
        return words
    variables = component.steps[0].env.items()
    return words + [
        f"--env={_quote(f'{key}={value}')}" for key, value in variables if not secret_kind(key, value)
    ]


def _command(job: BatchJob, component: Component) -> list[str]:
    command = () if job.job_file else ("--", *component.steps[0].command)
    return [_quote(word, job.elements) for word in command]


def _quote(text: str, elements: int = 0) -> str:
    """Returns a text as a word for bash; in an array `ARRAY_INDEX` stays a variable."""
    parts = text.split(ARRAY_INDEX) if elements else [text]
    return f'"{ARRAY_INDEX}"'.join(shlex.quote(part) if part or len(parts) == 1 else "" for part in parts)
