"""The tables of facts that end a report: dataset, training, export, versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.components.export_validate.training_record import TrainingRecord
from shardline.components.html.page import Rows, fact_rows
from shardline.trainer.data.manifest import Feature, Manifest

_MOST_COLUMNS = 20

# Of export.json: shown elsewhere on the page, or nothing that a person reads.
_NOT_FACTS = ("format", "format_version", "fingerprint", "parameters", "bytes")

# Of settings.json: shown with the dataset, or in a table of its own.
_NOT_SETTINGS = ("class_names", "versions")
_UNSET = ("", "[]", "{}", "null")


def fact_tables(
    manifest: Manifest, export: Mapping[str, Any], training: TrainingRecord
) -> list[tuple[str, Rows]]:
    """Returns the titles and the rows of the tables.

    Args:
        manifest: Of the dataset.
        export: Content of export.json.
        training: How the model was trained, as far as that is known.
    """
    settings = {name: value for name, value in training.settings.items() if name not in _NOT_SETTINGS}
    tables = [
        ("Dataset", _dataset_rows(manifest)),
        ("Training", [(name, value) for name, value in fact_rows(settings) if value not in _UNSET]),
        ("Versions in training", fact_rows(training.settings.get("versions", {}))),
        ("Export", _export_rows(export)),
        ("Versions in validation", fact_rows(export["versions"])),
    ]
    return [(title, rows) for title, rows in tables if rows]


def _dataset_rows(manifest: Manifest) -> Rows:
    splits = ", ".join(f"{name} {split.records:,}" for name, split in manifest.splits.items())
    rows = [
        ("source", manifest.source),
        ("fingerprint", manifest.fingerprint),
        ("examples", splits),
        ("classes", f"{len(manifest.class_names):,}"),
        _input_row(manifest.inputs),
        ("rejected examples", _rejected(manifest)),
    ]
    return rows + fact_rows(manifest.settings)


def _input_row(inputs: Mapping[str, Feature]) -> tuple[str, str]:
    if "image" in inputs:
        shape = " x ".join("any" if size is None else str(size) for size in inputs["image"].shape)
        return "image", f"{shape}, {inputs['image'].encoding}"
    first = ", ".join(list(inputs)[:_MOST_COLUMNS])
    return f"{len(inputs):,} columns", first + (", …" if len(inputs) > _MOST_COLUMNS else "")


def _rejected(manifest: Manifest) -> str:
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in manifest.rejected.items())
    return f"{sum(manifest.rejected.values()):,} ({reasons})" if reasons else "none"


def _export_rows(export: Mapping[str, Any]) -> Rows:
    """Returns the signatures, and whatever else of export.json is a single value."""
    rows = [(name, _signature(parts)) for name, parts in export.get("signatures", {}).items()]
    single = {
        name.replace("_", " "): value
        for name, value in export.items()
        if isinstance(value, str | int | float) and name not in _NOT_FACTS
    }
    return rows + fact_rows(single)


def _signature(parts: Mapping[str, Mapping[str, Any]]) -> str:
    inputs, outputs = (
        ", ".join(
            f"{name}: {_tensor(spec)}" for name, spec in list(parts.get(side, {}).items())[:_MOST_COLUMNS]
        )
        for side in ("inputs", "outputs")
    )
    return f"{inputs} → {outputs}"


def _tensor(spec: Mapping[str, Any]) -> str:
    return f"{spec['dtype']} [{', '.join('n' if size is None else str(size) for size in spec['shape'])}]"
