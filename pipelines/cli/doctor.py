"""The command `shardline doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardline.pipelines.cli.foreground import foreground
from shardline.pipelines.cli.options import environment_flags, json_option, show_json
from shardline.trainer.errors import EXIT_FAILED

if TYPE_CHECKING:
    from shardline.pipelines.diagnosis import Diagnosis

_MARKS = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


@click.command()
@click.option("--local", is_flag=True, help="Only this machine, not the platform.")
@click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Where run directories go.",
)
@json_option
@environment_flags
def doctor(local: bool, runs_dir: Path, as_json: bool, settings: Path | None, **flags: str) -> None:
    """Look at this machine and at the platform before a run has to: what is wrong, and what mends it.

    With --settings the image and the machines of the pipeline are looked at too. Nothing is changed. Ends
    with 1 when a run would fail.
    """
    from dataclasses import asdict

    found = []
    with foreground(sys.stderr):
        for item in _examine(local, runs_dir, settings, flags):
            found.append(item)
            if not as_json:
                _show(item)
    if as_json:
        show_json({"healthy": not _is_ill(found), "findings": [asdict(item) for item in found]})
    sys.exit(EXIT_FAILED if _is_ill(found) else 0)


def _examine(
    local: bool, runs_dir: Path, settings: Path | None, flags: dict[str, str]
) -> Iterator[Diagnosis]:
    from shardline.pipelines.local import doctor as here

    if not local:
        from shardline.pipelines import settings as compiled
        from shardline.pipelines.vertex import doctor as platform
        from shardline.pipelines.vertex.environment import load_environment

        environment = load_environment(settings, flags, os.environ)
        yield from platform.examine(environment, compiled.load(settings) if settings else None)
    yield from here.examine(runs_dir)


def _show(item: Diagnosis) -> None:
    click.echo(f"{_MARKS[item.level]}  {item.what}: {item.found}" + (f"; {item.fix}" if item.fix else ""))


def _is_ill(found: list[Diagnosis]) -> bool:
    return any(item.level == "error" for item in found)
