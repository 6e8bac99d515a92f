"""Commands about models: `shardline rehearse`, `validate` and `champion`."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline.components.text import facts, table
from shardline.components.validate import Gate
from shardline.pipelines.cli.options import (
    PATH,
    CommandGroup,
    json_option,
    parameter_options,
    setting_option,
    show,
)
from shardline.pipelines.local.terminal import foreground

if TYPE_CHECKING:
    from shardline.components.model_store.champions import Pointer, Version


@click.command()
@click.argument("pipeline", type=PATH)
@click.argument("dataset", type=PATH)
@parameter_options
def rehearse(pipeline: Path, dataset: Path, given: Mapping[str, Any] | None) -> None:
    """Try PIPELINE's training and gate on a few examples of DATASET.

    Takes less than a minute and keeps nothing. A run does the same before its training job.
    """
    from shardline.pipelines.parameters import rehearsal_arguments
    from shardline.pipelines.spec import load_pipeline

    training, gate, readers, servers = rehearsal_arguments(load_pipeline(pipeline), given or {})
    from shardline.components.rehearse import rehearsal
    from shardline.pipelines.local.process import processes

    with foreground(), processes.scratch_as_tempdir():
        rehearsal.rehearse(dataset, training, gate, readers=readers, parameter_servers=servers)


_setting = functools.partial(setting_option, Gate, optional=True)


@click.command()
@click.argument("model", type=PATH)
@click.argument("dataset", type=PATH)
@click.argument("out", type=PATH)
@click.option("--rules", "file", type=PATH, metavar="FILE", help="File of rules and policy (TOML or JSON).")
@_setting("rules", "--rule", multiple=True, type=str, metavar="RULE")
@_setting("champion_uri", "--champion", metavar="DIR")
@_setting("first_run")
@_setting("undecided")
@click.option(
    "--model-function",
    default="",
    metavar="PKG.MODULE:NAME",
    help="Function that built MODEL; its module is imported, which registers custom classes.",
)
@_setting("formats", "--also", multiple=True, type=str, metavar="FORMAT")
def validate(
    model: Path,
    dataset: Path,
    out: Path,
    model_function: str,
    **gate: Any,
) -> None:
    """Export MODEL, judge it on DATASET's test split, report to OUT.

    MODEL is a .keras file; OUT gets the export and report.html. The default rules of the gate apply;
    docs/gate.md explains them. A rule compares a metric, of all examples or of a slice, with a number or with
    the champion, which is evaluated again on the same examples:

    \b
      recall[class=healthy] >= 0.9
      worst_slice(accuracy) >= 0.8
      champion: accuracy >= champion (within 0.02)

    Exits with 1 if the model is not blessed.
    """  # noqa: D301  # click wants the character itself
    judging = _gate(**gate)
    from shardline.trainer.keras_compat import tensorflow_internals

    tensorflow_internals.import_tensorflow()
    from shardline.components.text import print_rows
    from shardline.components.validate import validation
    from shardline.pipelines.local.process import processes

    # TensorFlow writes the code that it generates to temporary files.
    with foreground(), processes.scratch_as_tempdir():
        outcome = validation.validate(model, dataset, out, gate=judging, model_function=model_function)
    if judging.champion_uri and outcome.blessing.blessed:
        command = ["shardline", "champion", "promote", judging.champion_uri, f"{out.absolute()}/"]
        print_rows([("next", "publish the model:"), ("", shlex.join(command))], sys.stdout)
    sys.exit(0 if outcome.blessing.blessed else 1)


def _gate(file: Path | None, rules: tuple[str, ...], **given: Any) -> Gate:
    gate = Gate.read(file) if file else Gate()
    changes = {name: value for name, value in given.items() if value}
    return replace(gate, rules=gate.rules + rules, **changes)


_store_argument = click.argument("directory", metavar="CHAMPION_URI")


@click.group(cls=CommandGroup)
def champion() -> None:
    """List published models, and choose the champion.

    The champion is the version in use. CHAMPION_URI is a directory, or gs://BUCKET/PATH, which need not be
    mounted.
    """


@champion.command("list")
@_store_argument
@json_option
def list_versions(directory: str, as_json: bool) -> None:
    """List versions in CHAMPION_URI, newest first; * is the champion."""
    from shardline.components.model_store import champions

    pointer, _ = champions.require_current(directory)
    versions = champions.versions(directory)[::-1]
    show(
        as_json,
        {**asdict(pointer), "champion": pointer.champion, "versions": list(map(asdict, versions))},
        table(
            ("", "version", "quality", "created", "by", "run", ""),
            [_row(item, pointer) for item in versions],
            align="l",
        ),
    )


@champion.command("show")
@_store_argument
@click.argument("version", default="")
@json_option
def show_champion(directory: str, version: str, as_json: bool) -> None:
    """Show VERSION in CHAMPION_URI, or the champion.

    VERSION is a name from 'list', or latest.
    """
    from shardline.components.model_store.champions import find_version, open_store, require_current

    pointer, present = require_current(directory)
    found = find_version(directory, version) if version else present
    about = {
        **asdict(found),
        "path": open_store(directory).location(found.path),
        "override": pointer.overrides.get(found.version, ""),
        "champion": "" if found.version in pointer.known else "never",
    }
    if found == present:
        about["champion"] = f"since {pointer.at} by {pointer.by}"
        about["replaced"] = next(iter(pointer.champions[1:]), "nothing")
    metrics = (f"{name} {value:.4g}" for name, value in found.metrics.items() if value is not None)
    texts = {**about, "metrics": ", ".join(metrics)}
    show(as_json, about, facts([(name, str(value)) for name, value in texts.items() if value]))


@champion.command()
@_store_argument
@click.argument("version")
@click.option(
    "--override",
    default="",
    metavar="REASON",
    help="Promote a version that the gate blocked; champion.json keeps REASON.",
)
@json_option
def promote(directory: str, version: str, override: str, as_json: bool) -> None:
    """Make VERSION the champion in CHAMPION_URI.

    VERSION is a name from 'list', latest for the newest, or the directory of a validated model, written with
    a slash: ./OUT of 'shardline validate', or the artifact 'exported' of a run. A directory is copied first.
    """
    from shardline.components.model_store import champions

    _tell(champions.promote(directory, version, override=override), as_json)


@champion.command()
@_store_argument
@json_option
def rollback(directory: str, as_json: bool) -> None:
    """Make the version that the champion replaced the champion again."""
    from shardline.components.model_store import champions

    _tell(champions.rollback(directory), as_json)


def _tell(present: Version, as_json: bool) -> None:
    words = f"version {present.version} is the champion ({present.quality})"
    show(as_json, asdict(present), words)


def _row(item: Version, pointer: Pointer) -> tuple[str, ...]:
    created = item.created.removesuffix("+00:00").replace("T", " ")
    note = "" if item.version in pointer.known else "never the champion"
    if not item.blessed:
        reason = pointer.overrides.get(item.version)
        note = f"blocked by the gate{f', promoted all the same: {reason}' if reason else ''}"
    mark = "*" if item.version == pointer.champion else ""
    return mark, item.version, item.quality, created, item.by, item.run, note
