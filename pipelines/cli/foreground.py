"""What the commands that work in the foreground have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

import click

from shardline.trainer import progress
from shardline.trainer.errors import ShardlineError

if TYPE_CHECKING:
    from shardline.pipelines.local.terminal import Terminal

#: Option of the commands that run custom jobs.
inject_option = click.option(
    "--inject",
    "injections",
    multiple=True,
    metavar="FAILURE",
    help="Rehearse a failure: preempt:worker:0@step=30, kill:chief@t=5s, slow:worker:1=2x.",
)


@contextlib.contextmanager
def foreground(stream: TextIO | None = None) -> Iterator[Terminal]:
    """Shows this process's progress to the person at the terminal.

    Args:
        stream: Where; standard output unless given.
    """
    from shardline.pipelines.local.terminal import open_terminal

    with open_terminal(stream) as terminal, progress.sink(terminal.show):
        yield terminal


def pairs(texts: Iterable[str], option: str, error: type[ShardlineError]) -> dict[str, str]:
    """Splits texts of the form NAME=VALUE.

    Raises:
        ShardlineError: Of the class `error`: a text has another form, or a name is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise error(f"{option} takes NAME=VALUE, got {text!r}")
        if name in found:
            raise error(f"{option} {name} is given twice: {found[name]!r} and {value!r}")
        found[name] = value
    return found
