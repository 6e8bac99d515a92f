"""The command `shardline`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from shardline.pipelines.cli.checks import check, doctor, settings, show
from shardline.pipelines.cli.data import dataset, preprocess
from shardline.pipelines.cli.models import champion, validate
from shardline.pipelines.cli.options import inject_option, pairs
from shardline.pipelines.cli.runs import cancel, explain, logs, status, submit
from shardline.pipelines.cli.schedule import schedule
from shardline.pipelines.cli.train import predict, train
from shardline.pipelines.cli.upload import image, upload
from shardline.trainer.errors import PipelineError, ShardlineError

# Every command imports what it needs inside: `shardline --help` waits for neither KFP nor TensorFlow.

_DIRECTORY = click.Path(path_type=Path)


class _Failure(click.ClickException):
    """A mistake of the user, or a failed run, as click shows it."""

    def __init__(self, error: ShardlineError) -> None:
        super().__init__(" ".join(str(error).split()))
        self.exit_code = error.exit_code  # type: ignore[misc]  # click reads it from the instance


class _Group(click.Group):
    """Ends with one line and the error's exit code where a command meets a mistake, not with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShardlineError as error:
            raise _Failure(error) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardline")
def main() -> None:
    """From a dataset and a Keras model to a retraining pipeline for Vertex AI Pipelines."""


@main.command()
@click.option(
    "--settings",
    type=_DIRECTORY,
    default=Path("settings/local.toml"),
    show_default=True,
    help="Image, machines and job of the environment.",
)
@click.option(
    "--pipeline",
    type=click.Choice(["retrain", "tune"]),
    default="retrain",
    show_default=True,
    help="Which one.",
)
@click.option(
    "--study",
    type=_DIRECTORY,
    default=Path("settings/tune.toml"),
    show_default=True,
    help="What the tuning pipeline searches.",
)
@click.option(
    "--output",
    type=_DIRECTORY,
    help="The compiled pipeline.  [default: compiled/retrain.yaml or compiled/tune.yaml]",
)
@click.option("--image", "digest", help="Instead of the settings' own: what 'shardline image push' prints.")
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
        if warnings:
            show(str(output), warnings)
        click.echo(f"{output} {'written' if changed else 'is up to date'}")


@main.command()
@click.argument("pipeline", type=_DIRECTORY)
@click.option("--param", "-p", "params", multiple=True, metavar="NAME=VALUE", help="A pipeline parameter.")
@click.option(
    "--runs-dir", type=_DIRECTORY, default=Path("runs"), show_default=True, help="Where run directories go."
)
@click.option("--require-blessing", is_flag=True, help="Exit with 1 when the model is not blessed.")
@inject_option
def run(
    pipeline: Path,
    params: tuple[str, ...],
    runs_dir: Path,
    require_blessing: bool,
    injections: tuple[str, ...],
) -> None:
    """Run PIPELINE, a compiled pipeline, on this machine, with a process for every replica.

    Everything goes to a new directory under RUNS_DIR. The champion_uri of our own
    pipelines is RUNS_DIR/champions/SOURCE unless it is given.
    """
    from shardline.pipelines.local.run import run_pipeline
    from shardline.pipelines.preflight import OURS, check_run
    from shardline.pipelines.spec import defaults, load_pipeline

    spec = load_pipeline(pipeline)
    parameters, _ = check_run(spec, pairs(params, "--param", PipelineError), here=True)
    if spec["pipelineInfo"]["name"] in OURS:
        # Models of different data do not replace each other.
        source = re.sub(r"\W+", "-", parameters.get("source", defaults(spec)["source"]))
        parameters.setdefault("champion_uri", str((runs_dir / "champions" / source).absolute()))
    run_pipeline(
        pipeline, parameters, runs_dir=runs_dir, require_blessing=require_blessing, injections=injections
    )


main.add_command(check)
main.add_command(predict)
main.add_command(preprocess)
main.add_command(dataset)
main.add_command(train)
main.add_command(champion)
main.add_command(image)
main.add_command(validate)
main.add_command(upload)
main.add_command(submit)
main.add_command(status)
main.add_command(cancel)
main.add_command(logs)
main.add_command(explain)
main.add_command(doctor)
main.add_command(settings)
main.add_command(schedule)
