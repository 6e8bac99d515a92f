"""`shardline launch`: a cluster on this machine for any Python program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardline.pipelines.cli.options import EVERY_RUN, MOST_REPLICAS, PATH, network_option, require_local


@click.command()
@click.argument("replicas", type=click.IntRange(1, MOST_REPLICAS), metavar="N")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.option("-m", "module", is_flag=True, help="PROGRAM is the name of a module, as of python -m.")
@click.option(
    "--ps",
    type=click.IntRange(0, MOST_REPLICAS),
    default=0,
    show_default=True,
    help="Parameter servers, which need workers.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="How often all replicas start again when one has failed.",
)
@click.option("--timeout", type=float, help="Seconds after which all replicas are stopped.")
@click.option("--logs", type=PATH, metavar="DIR", help="Where logs go.  [default: a new temporary directory]")
@network_option
@click.option(
    "--strategy/--no-strategy",
    default=None,
    help="Make shardline.strategy() before the program begins.  [default: where it imports shardline]",
)
def launch(program: str, arguments: tuple[str, ...], module: bool, logs: Path | None, **options: Any) -> None:
    """Run PROGRAM with ARGS, any Python program, as each of N replicas here, with a TF_CONFIG for each.

    The first replica is the chief, the others are workers. Their lines are shown with their names in front.
    When one fails, all are stopped, and the command fails; it succeeds when all have. None outlives it.

    Options of PROGRAM follow "--", which ends those of this command:

    \b
      shardline launch 2 -- program.py --epochs 3
      shardline launch 2 --restarts 1 -m -- package.program --epochs 3
    """  # noqa: D301  # click wants the character itself
    require_local(EVERY_RUN)
    from shardline.pipelines.local.launch import launch

    if program == "-m" and arguments:
        module, program, arguments = True, arguments[0], arguments[1:]
    launch(program, arguments=arguments, module=module, logs=logs, **options)
