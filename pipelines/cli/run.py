"""Commands that run on this machine: `shardline run`, `launch` and `train`."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from shardline.components.runs import Run, RunDirectory, log_run
from shardline.pipelines.cli.options import PATH, parameter_options, runs_dir_option
from shardline.pipelines.local.terminal import foreground
from shardline.trainer.base.errors import SettingsError

#: Largest number of replicas on one machine.
_MOST_REPLICAS = 100

_network_option = click.option(
    "--network",
    type=click.Choice(["auto", "isolated", "host"]),
    default="auto",
    show_default=True,
    help="Network of several replicas: isolated, the host's, or auto: isolated if the kernel allows it.",
)
_inject_option = click.option(
    "--inject",
    "injections",
    multiple=True,
    metavar="FAILURE",
    help="Inject a failure: preempt:worker:0@step=30, kill:chief@t=5s.",
)
_ps_option = click.option(
    "--ps",
    type=click.IntRange(0, _MOST_REPLICAS),
    default=0,
    show_default=True,
    help="Parameter servers; they need workers.",
)

#: Modules of the extra `local` that every local run needs, and those for Shardline's pipelines.
_EVERY_RUN = ("psutil", "rich")
_OUR_RUNS = (*_EVERY_RUN, "numpy", "tensorflow", "keras", "sklearn", "jinja2", "PIL", "matplotlib")


def _require_local(modules: Iterable[str]) -> None:
    """Raises SettingsError, with the missing modules and the extra, when modules are not installed."""
    if absent := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise SettingsError(
            f"a local run needs {', '.join(absent)}, which is not installed: pip install 'shardline[local]'"
        )


@click.command()
@click.argument("pipeline", type=PATH, required=False)
@parameter_options
@runs_dir_option
@click.option("--resume", metavar="RUN", help="Failed run to continue: its directory, its name, or latest.")
@click.option("--require-blessing", is_flag=True, help="Exit with 1 if the model is not blessed.")
@_network_option
@_inject_option
def run(
    pipeline: Path | None, given: Mapping[str, Any] | None, runs_dir: Path, resume: str | None, **options: Any
) -> None:
    """Run PIPELINE, a compiled pipeline, on this machine.

    Every replica is a process. All output goes to a new directory in RUNS_DIR, to which RUNS_DIR/latest
    links. The default champion_uri of Shardline's pipelines is RUNS_DIR/champions/SOURCE.

    --resume starts a new run with the pipeline and the parameters of a failed run, unless you set others, and
    continues training from a copy of its checkpoints.
    """
    _require_local(_EVERY_RUN)
    from shardline.pipelines.local.run import failed_run, run_pipeline, with_checkpoints

    failed = None
    if resume is not None:
        here = RunDirectory.find(resume, runs_dir)
        failed, pipeline = failed_run(here), pipeline or here.pipeline
        given = {**failed.parameters, **(given or {})}
    if pipeline is None:
        raise click.UsageError("Missing argument 'PIPELINE'.")
    parameters = _checked(pipeline, given or {}, runs_dir)
    if failed is not None:
        with foreground():
            parameters = with_checkpoints(failed, parameters)
    run_pipeline(pipeline, parameters, runs_dir=runs_dir, **options)


@click.command()
@click.argument("replicas", type=click.IntRange(1, _MOST_REPLICAS), metavar="N")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as in python -m.")
@_ps_option
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Number of times that all replicas restart after one fails.",
)
@click.option("--timeout", type=float, help="Seconds after which all replicas are stopped.  [default: never]")
@click.option(
    "--logs", type=PATH, metavar="DIR", help="Directory of the logs.  [default: a temporary directory]"
)
@_network_option
@click.option(
    "--strategy/--no-strategy",
    default=None,
    help="Create shardline.strategy() before the program starts.  [default: if it imports shardline]",
)
def launch(program: str, arguments: tuple[str, ...], module: bool, **options: Any) -> None:
    """Run a Python program as N replicas.

    Each is a process with its TF_CONFIG. The first replica is the chief, the others are workers. Each line of
    output begins with its replica's name. When a replica fails, all are stopped and the command fails.

    Options of PROGRAM follow "--":

    \b
      shardline launch 2 -- program.py --epochs 3
      shardline launch 2 --restarts 1 -m -- package.program --epochs 3
    """  # noqa: D301  # click wants the character itself
    _require_local(_EVERY_RUN)
    from shardline.pipelines.local import launch as launching

    if program == "-m" and arguments:
        module, program, arguments = True, arguments[0], arguments[1:]
    launching.launch(program, arguments=arguments, module=module, **options)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("dataset", type=PATH)
@click.argument("out", type=PATH)
@click.option(
    "--replicas",
    type=click.IntRange(1, _MOST_REPLICAS),
    default=1,
    show_default=True,
    help="Training replicas: a chief, the rest workers.",
)
@_ps_option
@click.option("--evaluator", is_flag=True, help="Add a replica that evaluates every checkpoint.")
@_network_option
@_inject_option
@click.argument("trainer_options", nargs=-1, type=click.UNPROCESSED)
def train(
    dataset: Path,
    out: Path,
    replicas: int,
    ps: int,
    evaluator: bool,
    network: str,
    injections: tuple[str, ...],
    trainer_options: tuple[str, ...],
) -> None:
    """Train a model on DATASET without a pipeline; write it to OUT.

    TRAINER_OPTIONS are those of python -m shardline.trainer.task; --model is mnist_cnn by default.
    """
    from shardline.components.text import print_rows
    from shardline.pipelines.local.job.custom_job import CustomJob
    from shardline.pipelines.local.job.supervisor import parse_injection, run_job
    from shardline.trainer import task
    from shardline.trainer.base import plugins
    from shardline.trainer.data import manifest as manifests
    from shardline.trainer.loop import fail_fast_marker

    arguments = ["--dataset", str(dataset), "--model-dir", str(out), "--model", "mnist_cnn", *trainer_options]
    # Refuses mistakes before any replica starts.
    given = task.parse(arguments)
    manifests.load(Path(given.dataset))
    plugins.check_reference(plugins.import_string(given.model), "model")
    failures = [parse_injection(text) for text in injections]
    job = CustomJob.with_roles(
        [sys.executable, "-m", "shardline.trainer.task", *arguments],
        replicas,
        ps=ps,
        evaluator=evaluator,
        display_name="train",
        # All-reduce cannot continue without a peer; a chief with parameter servers can, without a worker.
        restart_job_on_worker_restart=not ps,
    )
    fail_fast_marker.clear_markers(Path(given.model_dir))
    with foreground() as terminal:
        run_job(job, out / "replicas", show_line=terminal.line, injections=failures, network=network)
    model = Path(given.model_dir)
    name = str(model.absolute())
    log_run(name, Run(name=name, pipeline="", state="succeeded", training=str(model)))
    own = ["--model-function", given.model] if ":" in given.model else []
    judge = ["shardline", "validate", f"{model}/model.keras", given.dataset, f"{model}/validation", *own]
    print_rows([("next", "judge the model on the test split:"), ("", shlex.join(judge))], sys.stdout)


def _checked(pipeline: Path, given: Mapping[str, Any], runs_dir: Path) -> dict[str, Any]:
    from shardline.pipelines.check.checks import check_run
    from shardline.pipelines.spec import OWN_PIPELINES, defaults, load_pipeline

    spec = load_pipeline(pipeline)
    if spec["pipelineInfo"]["name"] in OWN_PIPELINES:
        _require_local(_OUR_RUNS)
    parameters, _ = check_run(spec, given, here=True)
    used = defaults(spec) | parameters
    is_ours = spec["pipelineInfo"]["name"] in OWN_PIPELINES
    if is_ours and "champion_uri" not in parameters and not used["champion_uri"]:
        # Models of different data or labels do not replace each other.
        of = " ".join(filter(None, (used["source"], used["label"])))
        parameters["champion_uri"] = str(runs_dir.absolute() / "champions" / _directory_name(of))
    return parameters


def _directory_name(source: str) -> str:
    name = re.sub(r"\W+", "-", source)
    if name == source and len(name) <= 100:
        return name
    return f"{name[:100]}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
