"""Command that runs a compiled pipeline on this machine: `shardline run`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from shardline.pipelines.cli.options import (
    EVERY_RUN,
    OUR_RUNS,
    PATH,
    foreground,
    inject_option,
    network_option,
    parameter_options,
    require_local,
    runs_dir_option,
    show_table,
)


@click.command()
@click.argument("pipeline", type=PATH, required=False)
@parameter_options
@runs_dir_option
@click.option(
    "--resume", metavar="RUN", help="Continue a run that failed: its directory, its name, or latest."
)
@click.option("--changed", is_flag=True, help="With --resume: the pipeline may have changed since then.")
@click.option(
    "--abandoned", is_flag=True, help="With --resume: a run that is recorded as running is no more."
)
@click.option(
    "--show-localized", is_flag=True, help="Run nothing; show what a local run changes in PIPELINE."
)
@click.option("--require-blessing", is_flag=True, help="Exit with 1 when the model is not blessed.")
@network_option
@inject_option
def run(
    pipeline: Path | None,
    given: Mapping[str, Any] | None,
    runs_dir: Path,
    resume: str | None,
    changed: bool,
    abandoned: bool,
    show_localized: bool,
    **options: Any,
) -> None:
    """Run PIPELINE, a compiled pipeline, on this machine, with a process for every replica.

    Everything is written to a new directory in RUNS_DIR, and RUNS_DIR/latest is a link to it. The
    champion_uri of Shardline's own pipelines is RUNS_DIR/champions/SOURCE unless it is given; a SOURCE with
    other characters than letters, digits, _ and single hyphens is shortened to these, and to a digest.

    With --resume, a new run does what a failed one was to do: PIPELINE and parameters are that run's unless
    they are given, and training goes on from a copy of its checkpoints.
    """
    require_local(EVERY_RUN)
    from shardline.components.run_directory import find_run
    from shardline.pipelines.local.record import FailedRun
    from shardline.pipelines.local.run import run_pipeline

    failed = None if resume is None else FailedRun.find(find_run(resume, runs_dir), abandoned=abandoned)
    if failed is not None:
        pipeline = failed.pipeline(pipeline, changed=changed)
        given = {**failed.record.parameters, **(given or {})}
    elif changed or abandoned:
        raise click.UsageError(f"--{'changed' if changed else 'abandoned'} needs --resume")
    if pipeline is None:
        raise click.UsageError("Missing argument 'PIPELINE'.")
    if show_localized:
        _show_localized(pipeline, given or {})
        return
    parameters = _checked(pipeline, given or {}, runs_dir)
    if failed is not None:
        with foreground():
            parameters = failed.with_checkpoints(parameters)
    run_pipeline(pipeline, parameters, runs_dir=runs_dir, **options)


def _show_localized(pipeline: Path, given: Mapping[str, Any]) -> None:
    from shardline.pipelines.local.at_hand import require_parts
    from shardline.pipelines.local.changes import listed
    from shardline.pipelines.parameters import check_parameters
    from shardline.pipelines.spec import parse_runnable, read_pipeline

    file = parse_runnable(read_pipeline(pipeline), pipeline)
    values = check_parameters(file.spec, given) if given else {}
    lost = [("platform", "left out", kind) for kind in file.of_other_platforms]
    show_table([("CHANGE", "HERE", "OF"), *listed(file.spec, values), *lost])
    require_parts(file.spec, values)


def _checked(pipeline: Path, given: Mapping[str, Any], runs_dir: Path) -> dict[str, Any]:
    """Returns the parameters of a run here, checked, with a directory of champions of its own."""
    from shardline.components.model_store.champions import directory_name
    from shardline.pipelines.check.checks import check_run
    from shardline.pipelines.preflight import OURS
    from shardline.pipelines.spec import defaults, load_pipeline

    spec = load_pipeline(pipeline)
    if spec["pipelineInfo"]["name"] in OURS:
        require_local(OUR_RUNS)
    parameters, _ = check_run(spec, given, here=True)
    if spec["pipelineInfo"]["name"] in OURS and "champion_uri" not in parameters:
        # Models of different data, or of other labels of the same, do not replace each other.
        source, label = parameters.get("source", defaults(spec)["source"]), parameters.get("label")
        of = f"{source} {label}" if label else source
        parameters["champion_uri"] = str(runs_dir.absolute() / "champions" / directory_name(of))
    return parameters
