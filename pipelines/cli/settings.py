"""The command `shardline settings show`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from shardline.pipelines.cli.options import environment_flags, json_option, show_json, show_table


@click.group()
def settings() -> None:
    """Look at the settings of an environment."""


@settings.command()
@environment_flags
@json_option
def show(settings: Path | None, as_json: bool, **flags: str) -> None:
    """Show every value, and where it came from.

    Those of [vertex] say where on the platform things are done; the others, if the file has an image, are
    fixed when a pipeline is compiled.
    """
    from shardline.pipelines.origins import compile_time_rows, environment_rows
    from shardline.pipelines.vertex.environment import load_environment, read_values

    values, origins = read_values(settings, flags, os.environ)
    rows = environment_rows(values, origins)
    if settings is not None:
        rows += compile_time_rows(settings)
    load_environment(settings, flags, os.environ, needed=())  # refuses a value of a wrong form
    if as_json:
        show_json({name: {"value": value, "origin": origin} for name, value, origin in rows})
    else:
        show_table(
            [("NAME", "VALUE", "FROM"), *((name, _text(value), origin) for name, value, origin in rows)]
        )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in ("", None) else str(value)
