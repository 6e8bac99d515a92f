"""`shardline new`: a project of one's own."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from shardline.pipelines.cli.options import PATH, show
from shardline.pipelines.project.new import KINDS


@click.command()
@click.argument("directory", type=PATH, metavar="DIR")
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    default="images",
    show_default=True,
    help="What the examples are.",
)
@click.option("--name", default="", help="Name of the package.  [default: that of DIR]")
def new(directory: Path, kind: str, name: str) -> None:
    """Write a project of your own to DIR: model, source, settings, parameters, tests, Makefile, CI.

    What it holds runs as it is, on data of its own, here with `make run` and on Vertex AI with `make submit`;
    model and source are then replaced by yours. DIR is new, or empty.
    """
    from shardline.pipelines.project import new as projects

    name = name or projects.package_name(directory)
    files = projects.write(directory, kind, name, projects.origin())
    head = f"{directory}: {KINDS[kind].data}, and a model of them, in a package {name} for you to replace"
    steps = (f"cd {shlex.quote(str(directory))}", "make run", "make test")
    show(False, None, head, "", *_tree(files), "", "Next:", "", *(f"    {step}" for step in steps))


def _tree(files: Iterable[Path]) -> Iterator[str]:
    """Yields a line for each folder and file, indented by its depth."""
    shown: set[Path] = set()
    for file in sorted(files, key=lambda path: (len(path.parts) == 1, path)):
        for folder in reversed(file.parents[:-1]):
            if folder not in shown:
                shown.add(folder)
                yield f"{'  ' * len(folder.parts)}{folder.name}/"
        yield f"{'  ' * len(file.parts)}{file.name}"
