"""Commands about runs: run, launch and train here, upload and submit for the platform, others for both."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import click

from shardline.components.runs import Run, RunDirectory, VertexRun, log_run
from shardline.components.text import duration, facts, print_rows
from shardline.components.vertex import Platform
from shardline.pipelines.cli.options import (
    PATH,
    PLATFORM_OPTIONS,
    environment_flags,
    environment_options,
    json_option,
    parameter_options,
    proof_options,
    runs_dir_option,
    show,
    show_json,
    show_table,
    typed,
)
from shardline.pipelines.local import foreground
from shardline.pipelines.settings import (
    Environment,
    is_filled_in,
    load_environment,
    project_settings,
    split_pairs,
)
from shardline.trainer import manifest as manifests
from shardline.trainer.base import plugins, progress
from shardline.trainer.base.errors import (
    EXIT_CANCELLED,
    EXIT_FAILED,
    CancelledRunError,
    RestartError,
    RunError,
    SettingsError,
    error_prefix,
)

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
    from shardline.pipelines.local import failed_run, run_pipeline, with_checkpoints

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
    from shardline.pipelines import local

    if program == "-m" and arguments:
        module, program, arguments = True, arguments[0], arguments[1:]
    local.launch(program, arguments=arguments, module=module, **options)


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
    from shardline.pipelines.local.job import CustomJob, parse_injection, run_job
    from shardline.trainer import task

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
    task.clear_markers(Path(given.model_dir))
    with foreground() as terminal:
        run_job(job, out / "replicas", show_line=terminal.line, injections=failures, network=network)
    model = Path(given.model_dir)
    name = str(model.absolute())
    log_run(name, Run(name=name, pipeline="", state="succeeded", training=str(model)))
    own = ["--model-function", given.model] if ":" in given.model else []
    judge = ["shardline", "validate", f"{model}/model.keras", given.dataset, f"{model}/validation", *own]
    print_rows([("next", "judge the model on the test split:"), ("", shlex.join(judge))], sys.stdout)


def _checked(pipeline: Path, given: Mapping[str, Any], runs_dir: Path) -> dict[str, Any]:
    from shardline.pipelines.check import check_run
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


_wait_option = click.option(
    "--wait",
    "waits",
    is_flag=True,
    help="Wait for the end of the run; exit with 1 if it failed, 4 if it was cancelled.",
)


@click.command()
@click.argument("pipeline")
@parameter_options
@click.option(
    "--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Tag of the run; Google Cloud calls it a label."
)
@click.option("--job-id", default="", help="Id of the run.  [default: a new one]")
@click.option("--no-cache", is_flag=True, help="Run every task, without cached results.")
@click.option(
    "--continue",
    "continued",
    default="",
    metavar="RUN",
    help="Continue from the checkpoints of RUN, which has ended; its parameters are the defaults.",
)
@_wait_option
@click.option("--dry-run", is_flag=True, help="Send nothing; show the request (with --json, in full).")
@json_option
@proof_options
@environment_options
def submit(
    pipeline: str,
    given: Mapping[str, Any] | None,
    tags: tuple[str, ...],
    job_id: str,
    no_cache: bool,
    continued: str,
    environment: Environment,
    prove: Callable[..., str],
    **how: bool,
) -> None:
    """Start a run of PIPELINE on the platform.

    PIPELINE is a compiled pipeline, or one in the registry:
    https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY/NAME/TAG. It is checked first, with its parameters, as
    'shardline check' does.
    """
    from shardline.pipelines.check import check_run
    from shardline.pipelines.remote import continue_parameters, job_request, request_summary
    from shardline.pipelines.spec import defaults

    spec, template_uri, content = read_spec(pipeline)
    if continued:
        given = continue_parameters(environment.platform, continued, given or {})
    parameters, warnings = check_run(spec, given or {}, location=environment.location, uri=template_uri)
    proof = prove(content, defaults(spec) | parameters)
    request = job_request(
        environment,
        spec,
        parameters,
        job_id=job_id,
        tags=split_pairs(tags, "--tag", form="KEY=VALUE"),
        cached=not no_cache,
        template_uri=template_uri,
    )
    for warning in warnings:
        click.echo(f"warning {warning.code} {warning.where}: {warning.why}; {warning.fix}", err=True)
    if how["dry_run"]:
        lines = request_summary(request, parameters, file=template_uri or pipeline, proof=proof)
        show(how["as_json"], request, lines, "nothing was sent; --json shows the whole request")
    else:
        run = VertexRun.submit(environment.platform, request)
        if not how["as_json"]:
            click.echo(f"submitted {run.name}\n{run.link}\nproof: {proof}")
        _finish(VertexRun(environment.platform, run.name), run, how["waits"], how["as_json"])


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --runs-dir and the platform options to a command, and passes it `finder`, a `RunFinder`."""

    @functools.wraps(command)
    def with_finder(*args: Any, runs_dir: Path, settings: Path | None, **values: Any) -> Any:
        flags = {name: values.pop(name) for name in PLATFORM_OPTIONS[1:]}
        return command(*args, finder=RunFinder(runs_dir, settings, flags), **values)

    return runs_dir_option(environment_flags(with_finder))


class RunFinder(NamedTuple):
    """Finds the runs of a command, by the values of --runs-dir and the platform options."""

    runs_dir: Path
    settings: Path | None
    flags: Mapping[str, str]

    def find(self, run: str) -> RunDirectory | VertexRun:
        """Returns a run: that of a directory, or else one on the platform."""
        with contextlib.suppress(SettingsError):
            return RunDirectory.find(run, self.runs_dir)
        with error_prefix(f"{run} is not a run directory; for a run on the platform "):
            return VertexRun(self.platform(), run)

    def platform(self) -> Platform:
        """Returns the platform of the options and settings."""
        return load_environment(self.settings, self.flags, os.environ).platform


@click.command()
@click.argument("run", required=False)
@click.option("--limit", default=10, show_default=True, type=click.IntRange(min=1), help="Number of runs.")
@_wait_option
@json_option
@run_options
def status(run: str | None, limit: int, waits: bool, as_json: bool, finder: RunFinder) -> None:
    """Show the tasks of RUN or, without RUN, the newest runs.

    RUN is a run directory, the name of a run in RUNS_DIR, latest, or the id of a run on the platform. The
    newest runs are those in RUNS_DIR and, where --settings, --project, VERTEX_PROJECT or the settings.toml of
    a project names one, on the platform.
    """
    if run is not None:
        with foreground(sys.stderr if as_json else None):
            asked = finder.find(run)
            found = asked.read()
            if waits:
                if not as_json:
                    click.echo(found.link)
                _finish(asked, found, waits, as_json)
            elif as_json:
                show_json(found.status())
            else:
                _show(found)
                click.echo(found.link)
    elif waits:
        raise click.UsageError("--wait needs a RUN")
    else:
        _list(finder, limit, as_json)


def _list(finder: RunFinder, limit: int, as_json: bool) -> None:
    listed = [("here", run) for run in RunDirectory.newest(finder.runs_dir, limit)]
    where = str(finder.runs_dir)
    is_named = finder.settings or finder.flags["project"] or os.environ.get("VERTEX_PROJECT")
    if is_named or is_filled_in(project_settings()):
        platform = finder.platform()
        listed += [("platform", run) for run in VertexRun.newest(platform, limit)]
        where = f"{where} and {platform.parent}"
    listed = sorted(listed, key=lambda item: item[1].created, reverse=True)[:limit]
    if as_json:
        show_json({"runs": [{"place": name, **run.status()} for name, run in listed]})
    elif listed:
        show_table([("RUN", "WHERE", "PIPELINE", "STATE", "BEGAN", "TOOK", ""), *starmap(_row, listed)])
    else:
        click.echo(f"no runs in {where}")


def _row(place: str, run: Run) -> tuple[str, ...]:
    began = f"{run.began:%Y-%m-%d %H:%M %Z}" if run.began else ""
    result = run.outcome or run.error or ""
    return run.name, place, run.pipeline, run.state, began, duration(run.seconds), result[:80]


@click.command()
@click.argument("run")
@json_option
@run_options
def cancel(run: str, as_json: bool, finder: RunFinder) -> None:
    """Cancel RUN, unless it has ended.

    RUN is a run directory, the name of a run in RUNS_DIR, latest, or the id of a run on the platform.
    """
    with foreground(sys.stderr if as_json else None):
        where = finder.find(run)
        found = where.read()
        if asked := not found.has_ended:
            where.cancel()
    if asked:
        owner = "the platform" if isinstance(where, VertexRun) else "its process"
        words = f"asked {owner} to cancel {found.name}, which was {found.state}"
    else:
        ended = "was cancelled" if found.state == "cancelled" else f"has {found.state}"
        words = f"nothing to cancel: {found.name} {ended}"
    show(as_json, {"run": found.name, "asked": asked, "state": found.state}, words)


@click.command()
@click.argument("run")
@click.option("--task", default="", help="Only this task.")
@click.option("--replica", default="", help="Only this replica of a custom job: chief-0, worker-1.")
@click.option("--follow", "-f", is_flag=True, help="Show new lines until the run ends.")
@run_options
def logs(run: str, task: str, replica: str, follow: bool, finder: RunFinder) -> None:
    """Show the output of the tasks of RUN.

    RUN is a run directory, the name of a run in RUNS_DIR, latest, or the id of a run on the platform.
    """
    with foreground(sys.stderr):
        for line in finder.find(run).read_log(task, replica, follow=follow):
            click.echo(line)


@click.command()
@click.argument("run", default=RunDirectory.LATEST)
@json_option
@run_options
def explain(run: str, as_json: bool, finder: RunFinder) -> None:
    """Explain why RUN failed or its model was blocked, and what to do.

    Names step, replica, exit code, last lines, likely cause and next step, or the rule that blocks the model.
    RUN is a run directory, the name of a run in RUNS_DIR, latest (the default), or the id of a run on the
    platform. Exits with 1 if it failed, with 4 if it was cancelled.
    """
    with foreground(sys.stderr):
        asked = finder.find(run)
        found = asked.explain(asked.read())
    show(as_json, found.record(), *_page(found))
    sys.exit({"failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}.get(found.state, 0))


@click.command()
@click.argument("pipeline", type=PATH)
@click.option(
    "--tag", "tags", multiple=True, help="Tag for the version; an existing tag is moved. Repeatable."
)
@json_option
@proof_options
@functools.partial(environment_options, needed=("registry",))
def upload(
    pipeline: Path, tags: tuple[str, ...], as_json: bool, environment: Environment, prove: Callable[..., str]
) -> None:
    """Upload PIPELINE, a compiled pipeline, to the registry.

    Its version gets the tags. An existing version is not uploaded again.
    """
    from shardline.pipelines.check import Pipeline, Target, check_pipeline, refuse_errors
    from shardline.pipelines.remote import upload_pipeline

    spec, _, content = read_spec(str(pipeline))
    refuse_errors(check_pipeline(Pipeline(spec, target=Target.PLATFORM)))
    proof = prove(content)
    name, address = spec["pipelineInfo"]["name"], environment.registry.rstrip("/")
    version, is_new = upload_pipeline(address, name, pipeline, tags)
    url = f"{address}/{name}/{version}"
    about = {"registry": address, "package": name, "version": version, "is_new": is_new, "url": url}
    lines = [f"{'uploaded' if is_new else 'already in the registry:'} {url}"]
    lines += [f"tag {tag} points to it" for tag in dict.fromkeys(tags)]
    show(as_json, {**about, "proof": proof}, *lines, f"proof: {proof}")


def read_spec(pipeline: str) -> tuple[dict[str, Any], str, bytes]:
    """Reads a compiled pipeline (IR) from a file or the registry.

    Returns the pipeline, its address with digest in the registry ("" for a file), and its bytes.
    """
    from shardline.pipelines.remote import download_pipeline
    from shardline.pipelines.spec import parse_pipeline, read_pipeline

    is_remote = pipeline.startswith("https://")
    content, address = download_pipeline(pipeline) if is_remote else (read_pipeline(Path(pipeline)), "")
    return parse_pipeline(content, Path(address or pipeline), sent=True), address, content


def _finish(asked: RunDirectory | VertexRun, run: Run, waits: bool, as_json: bool) -> None:
    try:
        found = _wait_for_run(functools.partial(asked.read, watching=True)) if waits else run
    except KeyboardInterrupt:
        raise RestartError(
            f"no longer watching; the run continues: {typed('status', run.name, '--wait')} watches it "
            f"again, {typed('cancel', run.name)} ends it"
        ) from None
    if as_json:
        show_json(found.status())
    elif waits:
        _show(found)
    else:
        click.echo(f"state: {found.state}; {typed('status', found.name, '--wait')} watches it")
    if waits:
        _raise_for_state(found, typed("explain", found.name))


#: Seconds between two reads of a run: at first, and at most.
_FIRST_S, _LAST_S = 0.5, 15.0


def _wait_for_run(read: Callable[[], Run]) -> Run:
    """Reads a run until it has ended, reports the states of its tasks, and returns it."""
    seen: dict[str, str] = {}
    pause = _FIRST_S
    while True:
        found = read()
        for task in found.tasks:
            has_started = not task.is_group and task.state not in ("waiting", "unknown")
            if has_started and seen.get(task.path) != task.state:
                seen[task.path] = task.state
                progress.report(task.name, task.summary)
        if found.has_ended:
            return found
        time.sleep(pause)
        pause = min(_LAST_S, pause * 1.3)


def _raise_for_state(run: Run, explain: str) -> None:
    """Raises RunError or CancelledRunError when a finished run has not succeeded; `explain` says more."""
    if run.state == "succeeded":
        return
    if run.state == "cancelled":
        raise CancelledRunError(f"the run {run.name} was cancelled")
    failed = run.failed_task
    where = f" in the task {failed.name}" if failed else ""
    why = (failed.error if failed else "") or run.error or "the platform does not say why"
    raise RunError(f"the run {run.name} failed{where}: {why.rstrip('.')}; {explain} says more")


def _show(found: Run) -> None:
    rows = [
        (task.name, task.state, duration(task.seconds), task.error[:80])
        for task in found.tasks
        if not task.is_group
    ]
    if rows:
        show_table([("TASK", "STATE", "DURATION", ""), *rows])
        click.echo()
    took = duration(found.seconds)
    click.echo(f"{found.name}: {found.state}{f' after {took}' if took else ''}")
    if found.error:
        click.echo(f"error: {found.error}")


def _page(found: Run) -> Iterator[str]:
    yield found.headline()
    last = found.explanation.lines if found.explanation else ()
    rows = [
        *found.rows(),
        *found.links.items(),
        *(("" if number else "last lines", f"| {line}") for number, line in enumerate(last)),
    ]
    for line in facts(rows).splitlines():
        yield f"  {line}"
