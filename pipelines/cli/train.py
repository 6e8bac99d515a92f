"""The command `shardline train`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shardline.pipelines.cli.foreground import foreground, inject_option

_DIRECTORY = click.Path(path_type=Path)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("dataset", type=_DIRECTORY)
@click.argument("out", type=_DIRECTORY)
@click.option(
    "--replicas", default=1, show_default=True, help="Replicas that train: a chief, the rest workers."
)
@click.option("--ps", default=0, show_default=True, help="Parameter servers, which need workers.")
@click.option("--evaluator", is_flag=True, help="Add a replica that evaluates every checkpoint.")
@inject_option
@click.argument("trainer_options", nargs=-1, type=click.UNPROCESSED)
def train(
    dataset: Path,
    out: Path,
    replicas: int,
    ps: int,
    evaluator: bool,
    injections: tuple[str, ...],
    trainer_options: tuple[str, ...],
) -> None:
    """Train a model on DATASET into OUT with a local cluster, without a pipeline.

    TRAINER_OPTIONS are those of `python -m shardline.trainer.task --help`; --model mnist_cnn unless given.
    """
    from shardline.pipelines.local.injection import parse_injection
    from shardline.pipelines.local.job import CustomJob
    from shardline.pipelines.local.supervisor import run_job
    from shardline.trainer import task

    arguments = ["--dataset", str(dataset), "--model-dir", str(out), "--model", "mnist_cnn", *trainer_options]
    task.parse(arguments)  # refuses a mistake here, before any replica starts
    job = CustomJob.with_roles(
        [sys.executable, "-m", "shardline.trainer.task", *arguments],
        replicas,
        ps=ps,
        evaluator=evaluator,
        # All-reduce cannot go on without a peer; a chief with parameter servers can do without a worker.
        restart_job_on_worker_restart=not ps,
    )
    drill = [parse_injection(text) for text in injections]
    with foreground() as terminal:
        run_job(job, out / "replicas", show_line=terminal.line, injections=drill)
