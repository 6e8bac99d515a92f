"""The command `shardline`, with its verbs that compile and train."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from shardline.pipelines.cli.champions import champion
from shardline.pipelines.cli.checks import check, doctor, settings, show_findings
from shardline.pipelines.cli.data import dataset, drift, preprocess
from shardline.pipelines.cli.history import runs
from shardline.pipelines.cli.launch import launch
from shardline.pipelines.cli.models import rehearse, validate
from shardline.pipelines.cli.new import new
from shardline.pipelines.cli.options import (
    MOST_REPLICAS,
    PATH,
    foreground,
    inject_option,
    network_option,
    path_option,
)
from shardline.pipelines.cli.probe import probe
from shardline.pipelines.cli.run import run
from shardline.pipelines.cli.runs import cancel, explain, logs, status, submit
from shardline.pipelines.cli.schedule import schedule
from shardline.pipelines.cli.upload import image, upload
from shardline.trainer.crash import as_error

# Every command imports what it needs inside: `shardline --help` waits for neither KFP nor TensorFlow.


class _Group(click.Group):
    """Ends a command that raises an error with one line and the error's exit code, no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as failure:
            error = as_error(failure)
            shown = click.ClickException(error.line)
            shown.exit_code = error.exit_code  # type: ignore[misc]  # click reads it from the instance
            raise shown from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardline")
def main() -> None:
    """From a dataset and a Keras model to a retraining pipeline for Vertex AI Pipelines."""


@main.command()
@path_option("--settings", "settings/local.toml", "Image, machines and job of the environment.")
@click.option(
    "--pipeline",
    type=click.Choice(["retrain", "tune"]),
    default="retrain",
    show_default=True,
    help="The pipeline to compile.",
)
@path_option("--study", "settings/tune.toml", "Search space of the tuning pipeline.")
@click.option(
    "--output",
    type=PATH,
    help="Where to write the compiled pipeline.  [default: compiled/retrain.yaml or compiled/tune.yaml]",
)
@click.option(
    "--image", "digest", help="Image instead of the settings' own, as 'shardline image push' prints it."
)
@click.option("--check", is_flag=True, help="Write nothing; fail when the file differs from the code.")
def compile(
    settings: Path, pipeline: str, study: Path, output: Path | None, digest: str | None, check: bool
) -> None:
    """Compile the retraining pipeline, or the tuning pipeline."""
    from shardline.pipelines import compile as compiling
    from shardline.pipelines import settings as environments
    from shardline.pipelines.preflight import load_study

    environment = environments.load(settings)
    if digest is not None:
        environment = replace(environment, image=digest)
    searched = load_study(study) if pipeline == "tune" else None
    output = output or Path("compiled", f"{pipeline}.yaml")
    if check:
        compiling.check(environment, output, searched)
        click.echo(f"{output} is what the code compiles to")
    else:
        changed, warnings = compiling.write(environment, output, searched)
        # What is no file may be standard output itself, which then holds the pipeline and nothing else.
        aside = not output.is_file() or output.is_relative_to("/dev")
        if warnings:
            show_findings(str(output), warnings, err=aside)
        click.echo(f"{output} {'written' if changed else 'is up to date'}", err=aside)


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("dataset", type=PATH)
@click.argument("out", type=PATH)
@click.option(
    "--replicas",
    type=click.IntRange(1, MOST_REPLICAS),
    default=1,
    show_default=True,
    help="Replicas that train: a chief, the rest workers.",
)
@click.option(
    "--ps",
    type=click.IntRange(0, MOST_REPLICAS),
    default=0,
    show_default=True,
    help="Parameter servers, which need workers.",
)
@click.option("--evaluator", is_flag=True, help="Add a replica that evaluates every checkpoint.")
@network_option
@inject_option
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
    """Train a model on DATASET with a cluster on this machine, without a pipeline, and write it to OUT.

    TRAINER_OPTIONS are those of `python -m shardline.trainer.task --help`; --model mnist_cnn unless given.
    """
    from shardline.pipelines.local.injections import parse_injection
    from shardline.pipelines.local.job import CustomJob
    from shardline.pipelines.local.supervisor import run_job
    from shardline.trainer import attempts, plugins, task
    from shardline.trainer.data import manifest as manifests
    from shardline.trainer.models import import_string

    arguments = ["--dataset", str(dataset), "--model-dir", str(out), "--model", "mnist_cnn", *trainer_options]
    # Refuses mistakes before any replica starts.
    given = task.parse(arguments)
    manifests.load(Path(given.dataset))
    plugins.look(import_string(given.model), "model")
    job = CustomJob.with_roles(
        [sys.executable, "-m", "shardline.trainer.task", *arguments],
        replicas,
        ps=ps,
        evaluator=evaluator,
        # All-reduce cannot go on without a peer; a chief with parameter servers can do without a worker.
        restart_job_on_worker_restart=not ps,
    )
    failures = [parse_injection(text) for text in injections]
    attempts.forget(Path(given.model_dir))
    with foreground() as terminal:
        run_job(job, out / "replicas", show_line=terminal.line, injections=failures, network=network)


_CHECKS = (check, settings, doctor)
_PARTS = (run, launch, preprocess, dataset, drift, rehearse, validate, probe, champion)
_PLATFORM = (image, upload, submit, runs, status, cancel, logs, explain, schedule)
for command in (new, *_CHECKS, *_PARTS, *_PLATFORM):
    main.add_command(command)
