"""Commands about data and models: preprocess, dataset and drift, rehearse, validate and champion."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import click

from shardline.components.model_store import champions
from shardline.components.model_store.champions import Pointer, Version
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.text import facts, print_rows, table
from shardline.components.validate import Gate
from shardline.pipelines.cli.options import (
    PATH,
    CommandGroup,
    json_option,
    parameter_options,
    setting_option,
    show,
    show_json,
)
from shardline.pipelines.local import foreground
from shardline.pipelines.settings import split_pairs
from shardline.trainer import manifest as manifests
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import check_keys
from shardline.trainer.base.errors import SettingsError

#: Settings that have no option of their own.
OTHERS = (
    *("check_images", "data_dir", "max_bad_fraction", "max_pixels", "on_anomaly"),
    *("resize_mode", "split_gap", "split_salt"),
)


_data_setting = functools.partial(setting_option, PreprocessSettings)


def _pairs(
    flag: str, name: str, metavar: str, text: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def parse_pairs(
        context: click.Context, option: click.Parameter, values: tuple[str, ...]
    ) -> dict[str, Any]:
        pairs = split_pairs((part for one in values for part in one.split(",")), flag)
        return {key: _convert(f"{flag} {key}", value, name) for key, value in pairs.items()}

    return click.option(flag, name, multiple=True, callback=parse_pairs, metavar=metavar, help=text)


def _convert(shown: str, text: str, name: str) -> Any:
    """Returns the value of a setting, or of an item of it, from a text."""
    from shardline.pipelines.parameters import convert, field_declaration

    return convert(shown, text, field_declaration(PreprocessSettings, name, item=True))


@click.command()
@click.argument("source")
@click.argument("out", type=PATH)
@_data_setting("labels", metavar="CSV")
@_pairs("--feature", "features", "OURS=THEIRS,...", "Name of a feature in the source: image=image/encoded.")
@_data_setting("label", metavar="KIND:COLUMN,...")
@_pairs(
    "--column",
    "columns",
    "NAME=TYPE,...",
    "text, integer, number, day-first or month-first; else from its values.",
)
@_pairs("--split", "split", "NAME=SHARE,...", "Shares of the splits; else train=0.8,validation=0.1,test=0.1.")
@_data_setting("stratify", is_flag=True)
@_data_setting("key")
@_data_setting("group", metavar="FEATURE")
@_data_setting("split_by_time", metavar="COLUMN")
@_data_setting("seed")
@_data_setting("shards")
@_data_setting("readers")
@_data_setting("image_size", metavar="PX")
@_data_setting("encoding")
@_data_setting("processes")
@_data_setting("on_bad_record")
@_data_setting("schema", metavar="FILE")
@click.option(
    "--option",
    "-o",
    "others",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda context, option, values: _others(values),
    help=f"Any other setting: {', '.join(OTHERS)}.",
)
@click.option("--overwrite", is_flag=True, help="Replace the dataset in OUT.")
@click.option("--dry-run", is_flag=True, help="Show what would be read, and what BigQuery would bill.")
@json_option
def preprocess(
    source: str,
    out: Path,
    features: dict[str, str],
    others: dict[str, Any],
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write SOURCE to OUT as TFRecord shards with a manifest.

    SOURCE is digits, tfds:NAME[:CONFIG], images:DIR, text:DIR, tfrecord:GLOB, table:PATH, bigquery:TABLE or
    QUERY, or pkg.module:Source.
    After an interruption, the same command continues.
    """
    from shardline.components.preprocess import run
    from shardline.components.preprocess.inspect import describe

    settings = PreprocessSettings(source=source, features=features, **options, **others)
    if dry_run:
        # Without reading it.
        from shardline.components.changes import fingerprint
        from shardline.components.preprocess.sources import bigquery, check_form, open_source

        check_form(source)
        settings = replace(settings, source=bigquery.pin_snapshot(source))
        found = {"source": settings.source, "content": fingerprint(settings).text}
        if settings.source.startswith(bigquery.PREFIX):
            found["cost"] = cast(bigquery.BigQuery, open_source(settings)).cost()
        show(as_json, found, *(f"{name}: {text}" for name, text in found.items()))
        return
    with foreground(sys.stderr if as_json else None):
        manifest = run.preprocess(settings, out, overwrite=overwrite)
    if as_json:
        show_json(describe(manifest))


def _others(values: tuple[str, ...]) -> dict[str, Any]:
    given = split_pairs(values, "--option")
    check_keys(given, OTHERS, "--option ")
    return {name: _convert(f"--option {name}", text, name) for name, text in given.items()}


@click.group(cls=CommandGroup)
def dataset() -> None:
    """Inspect a finished dataset directory."""


@dataset.command("stats")
@click.argument("directory", type=PATH)
@json_option
def show_stats(directory: Path, as_json: bool) -> None:
    """Show manifest, labels, columns and image sizes of DIRECTORY."""
    from shardline.components.preprocess.inspect import describe, make_profile, render

    manifest = manifests.load(directory)
    found = make_profile(directory, manifest, "")
    show(as_json, {**describe(manifest), "profile": asdict(found)}, render(manifest, found))


@dataset.command("schema")
@click.argument("directory", type=PATH)
@click.option("--output", type=PATH, help="New file to write.  [default: standard output]")
def draft_schema(directory: Path, output: Path | None) -> None:
    """Draft a schema from the columns and labels of DIRECTORY.

    It is for preprocess --schema. Edit the draft: it describes this dataset, not what the next one may
    contain.
    """
    from shardline.components.preprocess.inspect import draft, make_profile

    if output and output.exists():
        raise SettingsError(f"{output} exists; choose another --output, or remove it")
    manifest = manifests.load(directory)
    with foreground(sys.stderr):
        found = draft(manifest, make_profile(directory, manifest, "", whole=True))
    if not output:
        show_json(found)
        return
    text = json.dumps(found, indent=2, ensure_ascii=False)
    files.write_text(output, f"{text}\n")
    click.echo(f"{output}: {len(found['fields']):,} fields; edit the draft before you use it")


@dataset.command("verify")
@click.argument("directory", type=PATH)
@click.option("--deep", is_flag=True, help="Decode every image, too.")
@json_option
def run_verify(directory: Path, deep: bool, as_json: bool) -> None:
    """Compare every record of DIRECTORY with the manifest.

    Prints the file and the record (from 0) of all damage, and exits with 1 if there is any.
    """
    from shardline.components.preprocess.inspect import verify

    with foreground(sys.stderr):
        found = verify(directory, deep=deep)
    show(as_json, found.to_json(), *map(str, found.damages), found.summary())
    sys.exit(1 if found.damages else 0)


@click.command()
@click.argument("before", type=PATH)
@click.argument("after", type=PATH, required=False)
@json_option
def drift(before: Path, after: Path | None, as_json: bool) -> None:
    """Compare the training data of two datasets, feature by feature.

    Without AFTER, compares the training split of BEFORE with its test split. Exits with 1 if a feature has
    drifted.
    """
    from shardline.components.validate.metrics import drift

    found = drift.compare_datasets(before, after or before, ("train", "train" if after else "test"))
    moved = sum(item.moved for item in found)
    summary = (
        f"drift: {moved} of {len(found)} features moved" if moved else f"no drift in {len(found)} features"
    )
    show(
        as_json,
        {"drifted": moved, "features": list(map(asdict, found))},
        drift.drift_table(found),
        "",
        summary,
    )
    sys.exit(1 if moved else 0)


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
    from shardline.pipelines.local.process import scratch_as_tempdir

    with foreground(), scratch_as_tempdir():
        rehearsal.rehearse(dataset, training, gate, readers=readers, parameter_servers=servers)


_gate_setting = functools.partial(setting_option, Gate, optional=True)


@click.command()
@click.argument("model", type=PATH)
@click.argument("dataset", type=PATH)
@click.argument("out", type=PATH)
@click.option("--rules", "file", type=PATH, metavar="FILE", help="File of rules and policy (TOML or JSON).")
@_gate_setting("rules", "--rule", multiple=True, type=str, metavar="RULE")
@_gate_setting("champion_uri", "--champion", metavar="DIR")
@_gate_setting("first_run")
@_gate_setting("undecided")
@click.option(
    "--model-function",
    default="",
    metavar="PKG.MODULE:NAME",
    help="Function that built MODEL; its module is imported, which registers custom classes.",
)
@_gate_setting("formats", "--also", multiple=True, type=str, metavar="FORMAT")
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
    from shardline.components.validate import validation
    from shardline.pipelines.local.process import scratch_as_tempdir

    # TensorFlow writes the code that it generates to temporary files.
    with foreground(), scratch_as_tempdir():
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
    pointer, present = champions.require_current(directory)
    found = champions.find_version(directory, version) if version else present
    about = {
        **asdict(found),
        "path": champions.open_store(directory).location(found.path),
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
    _show_version(champions.promote(directory, version, override=override), as_json)


@champion.command()
@_store_argument
@json_option
def rollback(directory: str, as_json: bool) -> None:
    """Make the version that the champion replaced the champion again."""
    _show_version(champions.rollback(directory), as_json)


def _show_version(present: Version, as_json: bool) -> None:
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
