"""Commands about runs: submit, status and cancel on the platform, logs and explain here, too."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.components.runs.directory import find_run, read_local_record, read_log
from shardline.components.runs.record import ABANDONED, CANCELLED, FAILED, RUNNING, RunRecord
from shardline.components.text import facts
from shardline.components.vertex.forms import check_labels
from shardline.pipelines.cli.options import (
    environment_flags,
    environment_options,
    foreground,
    json_option,
    pairs,
    parameter_options,
    proof_options,
    runs_dir_option,
    show,
    show_json,
    show_table,
    typed,
)
from shardline.trainer.base.errors import EXIT_CANCELLED, EXIT_FAILED, RestartError, SettingsError

if TYPE_CHECKING:
    from shardline.components.runs.platform_run import PlatformRun
    from shardline.components.vertex.client import Platform
    from shardline.pipelines.parameters import Proofs
    from shardline.pipelines.settings import Environment

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
    proofs: Proofs,
    **how: bool,
) -> None:
    """Start a run of PIPELINE on the platform.

    PIPELINE is a compiled pipeline, or one in the registry:
    https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY/NAME/TAG. It is checked first, with its parameters, as
    'shardline check' does.
    """
    from shardline.pipelines.check.checks import check_run
    from shardline.pipelines.remote import submit as submission

    spec, template_uri, content = read_spec(pipeline)
    if continued:
        given = submission.continue_parameters(environment.platform, continued, given or {})
    check_labels(own := pairs(tags, "--tag", SettingsError, "KEY=VALUE"), " (from --tag)")
    parameters, warnings = check_run(spec, given or {}, settings=environment.file)
    proof = proofs.describe(content)
    request = submission.job_request(
        environment,
        spec,
        parameters,
        job_id=job_id or submission.new_job_id(spec["pipelineInfo"]["name"]),
        tags=own,
        enable_caching=False if no_cache else None,
        template_uri=template_uri,
    )
    for warning in warnings:
        click.echo(f"warning {warning.code} {warning.where}: {warning.why}; {warning.fix}", err=True)
    if how["dry_run"]:
        lines = submission.summary(request, parameters, file=template_uri or pipeline, proof=proof)
        show(how["as_json"], request, lines, "nothing was sent; --json shows the whole request")
    else:
        run = submission.submit(environment.platform, request)
        if not how["as_json"]:
            click.echo(f"submitted {run.job_id}\n{run.link}\nproof: {proof}")
        _finish(environment.platform, run, how["waits"], how["as_json"])


@click.command()
@click.argument("run", required=False)
@click.option("--limit", default=10, show_default=True, type=click.IntRange(min=1), help="Number of runs.")
@_wait_option
@json_option
@functools.partial(environment_options, otherwise="'shardline runs' lists the runs on this machine")
def status(run: str | None, limit: int, waits: bool, as_json: bool, environment: Environment) -> None:
    """Show the tasks of RUN or, without RUN, the latest runs."""
    from shardline.components.runs.platform_run import latest_runs, read_run

    platform = environment.platform
    if run is not None:
        found = read_run(platform, run)
        if waits:
            if not as_json:
                click.echo(found.link)
            _finish(platform, found, waits, as_json)
        elif as_json:
            show_json(found.as_json())
        else:
            _show(found)
            click.echo(found.link)
    elif waits:
        raise click.UsageError("--wait needs a RUN")
    else:
        show_runs(latest_runs(platform, limit), f"no runs in {platform.parent}", as_json)


@click.command()
@click.argument("run")
@json_option
@environment_options
def cancel(run: str, as_json: bool, environment: Environment) -> None:
    """Cancel RUN, unless it has ended."""
    from shardline.pipelines.remote import submit as submission

    asked, found = submission.cancel(environment.platform, run)
    if asked:
        words = f"asked the platform to cancel {found.job_id}, which was {found.state}"
    else:
        ended = "was cancelled" if found.state == CANCELLED else f"has {found.state}"
        words = f"nothing to cancel: {found.job_id} {ended}"
    show(as_json, {"run": found.job_id, "asked": asked, "state": found.state}, words)


@click.command()
@click.argument("run")
@click.option("--task", default="", help="Only this task.")
@click.option("--replica", default="", help="Only this replica of a custom job: chief-0, worker-1.")
@click.option("--follow", "-f", is_flag=True, help="Show new lines until the run ends.")
@runs_dir_option
@environment_flags
def logs(
    run: str,
    task: str,
    replica: str,
    follow: bool,
    runs_dir: Path,
    settings: Path | None,
    **flags: str,
) -> None:
    """Show the output of the tasks of RUN.

    RUN is a run directory, the name of a run in RUNS_DIR, latest, or the id of a run on the platform.
    """
    place = find_place(run, runs_dir, settings, flags)
    with foreground(sys.stderr):
        if isinstance(place, Path):
            lines = read_log(place, task, replica, follow=follow)
        else:
            from shardline.components.runs.logs import read_log as read_platform_log

            lines = read_platform_log(place, run, task, _pool_name(replica), follow=follow)
        for line in lines:
            click.echo(line)
        record = RunRecord.read(place) if follow and isinstance(place, Path) else None
        if record and (record.state == RUNNING or record.error == ABANDONED):
            why = record.error or "its record does not name the machine on which it runs"
            click.echo(f"no longer following {record.name}: {why}", err=True)


@click.command()
@click.argument("run")
@runs_dir_option
@json_option
@environment_flags
def explain(run: str, runs_dir: Path, as_json: bool, settings: Path | None, **flags: str) -> None:
    """Explain why RUN failed, and what to do.

    Names step, replica, exit code, last lines, likely cause and next step. RUN is a run directory, the name
    of a run in RUNS_DIR, latest, or the id of a run on the platform. Exits with 1 if it failed, with 4 if it
    was cancelled.
    """
    with foreground(sys.stderr):
        found = find_record(run, runs_dir, settings, flags)
    show(as_json, found.as_json(), *_page(found))
    sys.exit({FAILED: EXIT_FAILED, CANCELLED: EXIT_CANCELLED}.get(found.state, 0))


def read_spec(pipeline: str) -> tuple[dict[str, Any], str, bytes]:
    """Reads a compiled pipeline (IR) from a file or the registry.

    Returns the pipeline, its address with digest in the registry ("" for a file), and its bytes.
    """
    from shardline.pipelines.remote.upload import download
    from shardline.pipelines.spec import parse_pipeline, read_pipeline

    if pipeline.startswith("https://"):
        content, address = download(pipeline)
        return parse_pipeline(content, Path(address)), address, content
    content = read_pipeline(Path(pipeline))
    return parse_pipeline(content, Path(pipeline)), "", content


def show_runs(runs: list[PlatformRun], none: str, as_json: bool) -> None:
    """Prints a list of runs, or the text `none` for an empty list."""
    if as_json:
        show_json({"runs": [item.as_json() for item in runs]})
    elif runs:
        rows = ((item.job_id, item.state, local_time(item.created), item.duration) for item in runs)
        show_table([("RUN", "STATE", "SUBMITTED", "DURATION"), *rows])
    else:
        click.echo(none)


def _finish(platform: Platform, run: PlatformRun, waits: bool, as_json: bool) -> None:
    from shardline.pipelines.remote.submit import raise_for_state, wait_for_run

    try:
        found = wait_for_run(platform, run.name) if waits else run
    except KeyboardInterrupt:
        raise RestartError(
            f"no longer watching; the run continues: {typed('status', run.job_id, '--wait')} watches it "
            f"again, {typed('cancel', run.job_id)} ends it"
        ) from None
    if as_json:
        show_json(found.as_json())
    elif waits:
        _show(found)
    else:
        click.echo(f"state: {found.state}; {typed('status', found.job_id, '--wait')} watches it")
    if waits:
        raise_for_state(found, typed("explain", found.job_id))


def _show(found: PlatformRun) -> None:
    rows = [
        (task.name, task.state, task.duration, task.error[:80]) for task in found.tasks if not task.is_group
    ]
    if rows:
        show_table([("TASK", "STATE", "DURATION", ""), *rows])
        click.echo()
    click.echo(f"{found.job_id}: {found.state}{f' after {found.duration}' if found.duration else ''}")
    if found.error:
        click.echo(f"error: {found.error}")


def local_time(moment: str) -> str:
    """Returns a time (RFC 3339) in the local time zone; "" for none."""
    return f"{datetime.datetime.fromisoformat(moment).astimezone():%Y-%m-%d %H:%M %Z}" if moment else ""


def _page(found: RunRecord) -> Iterator[str]:
    yield found.headline()
    rows = list(found.links.items())
    if found.explanation is not None:
        last = found.explanation.lines
        rows = [*found.explanation.rows(), *rows]
        rows += [("" if number else "last lines", f"| {line}") for number, line in enumerate(last)]
    for line in facts(rows).splitlines():
        yield f"  {line}"


def find_place(run: str, runs_dir: Path, settings: Path | None, flags: dict[str, str]) -> Path | Platform:
    """Returns the directory of a run on this machine, or the platform for a run there."""
    from shardline.pipelines.settings import load_environment

    with contextlib.suppress(SettingsError):
        return find_run(run, runs_dir)
    try:
        return load_environment(settings, flags, os.environ).platform
    except SettingsError as error:
        raise SettingsError(f"{run} is not a run directory; for a run on the platform {error}") from None


def find_record(run: str, runs_dir: Path, settings: Path | None, flags: dict[str, str]) -> RunRecord:
    """Returns the record of a run on this machine, or on the platform."""
    place = find_place(run, runs_dir, settings, flags)
    if isinstance(place, Path):
        return read_local_record(place)
    from shardline.components.runs.logs import read_platform_record

    return read_platform_record(place, run)


def _pool_name(replica: str) -> str:
    """Returns the platform's name of a replica: workerpool1-0 for worker-0."""
    from shardline.pipelines.engines.custom_job import ROLES

    found = re.fullmatch(rf"({'|'.join(ROLES)})-(\d+)", replica)
    return f"workerpool{ROLES.index(found[1])}-{found[2]}" if found else replica
