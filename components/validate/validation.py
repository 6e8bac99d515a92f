"""Validation from a model file to a verdict: export, evaluate, judge, report.

The present champion as a challenger's opponent: found, and measured again on the same examples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardline.components import model_store
from shardline.components.model_store import champion_directory, current
from shardline.components.validate import model_card
from shardline.components.validate.evaluate import Measured, compare, measure
from shardline.components.validate.evaluation import Evaluation
from shardline.components.validate.examples import find_split, take_samples
from shardline.components.validate.export import export_model
from shardline.components.validate.gate import Blessing, Gate, judge
from shardline.components.validate.model_card import make_card
from shardline.components.validate.report import render_report
from shardline.trainer import files
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import ModelError, ShardlineError
from shardline.trainer.progress import fact, say
from shardline.trainer.saving import load_model

_FEW = 5


def challenge(
    challenger: Measured, champion_uri: str, dataset: Path, split: str, *, min_slice: int
) -> tuple[Evaluation, str]:
    """Measures the champion as the challenger was measured.

    Args:
        challenger: What was measured of the new model.
        champion_uri: Where champions are published: a directory or gs://.
        dataset: Dataset directory.
        split: Name of the split that the challenger was measured on.
        min_slice: Smallest slice that a rule may be judged on.

    Returns:
        The challenger's evaluation with that of the champion; or, where the champion cannot be measured, the
        challenger's alone and the reason.
    """
    try:
        saved_model = find_champion(champion_directory(champion_uri), manifests.load(dataset))
        champion = measure(saved_model, dataset, split, min_slice=min_slice)
    except ShardlineError as error:
        return challenger.evaluation, str(error)
    return compare(challenger, champion), ""


def find_champion(directory: Path, manifest: Manifest) -> Path:
    """Returns the directory of the champion's SavedModel, if it can be measured on a dataset.

    Args:
        directory: Where champions are published.
        manifest: Of the dataset.

    Raises:
        ModelError: When there is no champion yet, it is damaged, or it is for other classes or other input.
    """
    published = current(directory)
    if published is None:
        raise ModelError(f"there is no champion in {directory} yet")
    path = directory / published.path
    try:
        export = json.loads((path / model_store.EXPORT_FILE).read_text(encoding="utf-8"))
        names, inputs = tuple(export["class_names"]), set(export["inputs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read {path / model_store.EXPORT_FILE} of the champion: {error!r}") from None
    for kind, found, wanted in (
        ("classes", names, manifest.class_names),
        ("inputs", tuple(sorted(inputs)), tuple(sorted(manifest.inputs))),
    ):
        if found != wanted:
            raise ModelError(
                f"the champion {published.version} has other {kind} ({_enumerate(found)}) than the dataset "
                f"({_enumerate(wanted)})"
            )
    return path / model_store.SAVED_MODEL


def _enumerate(names: tuple[str, ...]) -> str:
    return ", ".join(map(str, names[:_FEW])) + (", ..." if len(names) > _FEW else "")


SPLIT = "test"


@dataclass(frozen=True)
class Validation:
    """Outcome of a validation: what was measured, and what follows from it."""

    evaluation: Evaluation
    blessing: Blessing


def validate(
    model_file: Path,
    dataset: Path,
    out: Path,
    *,
    gate: Gate,
    champion_uri: str = "",
    formats: Sequence[str] = (),
) -> Blessing:
    """Exports a model, measures the export on the test split, and decides whether it may be published.

    All input is checked before anything is written, but for the examples themselves: where one of them
    cannot be read the evaluation ends, and there is an export without a verdict.

    Args:
        model_file: A model.keras; history.csv and settings.json of its training are used when beside it.
        dataset: Dataset directory.
        out: Output directory; `layout` says what it holds afterwards. An earlier validation is replaced.
        gate: Rules that the model must pass.
        champion_uri: Where champions are published, a directory or gs://, for rules that compare with the
            champion; "" where there are none.
        formats: Into which the model is converted as well: "onnx", "tflite".

    Raises:
        SettingsError: When a rule is about a class or feature that the dataset does not have, or about a
            champion without `champion_uri`, or `out` cannot be written to.
        DatasetError: When the dataset or its test split cannot be used.
        ModelError: When the model cannot be loaded or does not fit the dataset.
    """
    return run(model_file, dataset, out, gate=gate, champion_uri=champion_uri, formats=formats).blessing


def run(
    model_file: Path,
    dataset: Path,
    out: Path,
    *,
    gate: Gate,
    champion_uri: str = "",
    formats: Sequence[str] = (),
) -> Validation:
    """Does what `validate` says, and returns the evaluation as well."""
    manifest = manifests.load(dataset)
    find_split(manifest, dataset, SPLIT)
    gate.check(manifest, champion_uri)
    training = model_card.read(model_file)
    model = load_model(model_file)
    say("validate", "exporting the model")
    samples = take_samples(manifest, dataset)
    export_model(
        model,
        manifest,
        out,
        model_file=model_file,
        samples=samples,
        settings=training.settings,
        formats=formats,
    )
    say("validate", f"evaluating the export on {manifest.splits[SPLIT].records:,} {SPLIT} examples")
    evaluation, no_champion = _measure(out, dataset, gate, champion_uri)
    blessing = judge(evaluation, gate, no_champion=no_champion, warnings=_warnings(manifest, no_champion))
    files.write_json(out / model_store.EVALUATION_FILE, evaluation.to_json())
    export = json.loads((out / model_store.EXPORT_FILE).read_text(encoding="utf-8"))
    report = render_report(evaluation, blessing, manifest, export, training)
    files.write_text(out / model_store.REPORT_FILE, report)
    verdict = f"{'Blessed' if blessing.blessed else 'Not blessed'}: {blessing.reason}"
    card = make_card(manifest, export, training, evaluation, verdict)
    files.write_text(out / model_store.CARD_TEXT_FILE, card.to_markdown())
    files.write_text(out / model_store.CARD_FILE, card.to_html())
    files.write_json(out / model_store.BLESSING_FILE, blessing.to_json())
    _tell(evaluation, blessing, out)
    return Validation(evaluation, blessing)


def _measure(out: Path, dataset: Path, gate: Gate, champion_uri: str) -> tuple[Evaluation, str]:
    """Returns what was measured, and why there is no champion in it."""
    challenger = measure(out / model_store.SAVED_MODEL, dataset, SPLIT, min_slice=gate.min_slice)
    export = json.loads((out / model_store.EXPORT_FILE).read_text(encoding="utf-8"))
    if "max_difference" in export:
        metrics = {**challenger.evaluation.metrics, "max_difference": float(export["max_difference"])}
        challenger = replace(challenger, evaluation=replace(challenger.evaluation, metrics=metrics))
    if not champion_uri:
        return challenger.evaluation, ""
    say("validate", f"measuring the champion in {champion_uri} on the same examples")
    return challenge(challenger, champion_uri, dataset, SPLIT, min_slice=gate.min_slice)


def _warnings(manifest: Manifest, no_champion: str) -> tuple[str, ...]:
    """Returns what a person should know beside the rules."""
    warnings = [f"Not compared with a champion: {no_champion}"] if no_champion else []
    if "train" in manifest.splits:
        trained, tested = (manifest.splits[split].class_counts for split in ("train", SPLIT))
        unseen = [
            name
            for name, before, now in zip(manifest.class_names, trained, tested, strict=True)
            if now and not before
        ]
        if unseen:
            warnings.append(f"Without examples in training: {', '.join(unseen)}")
    return tuple(warnings)


def _tell(evaluation: Evaluation, blessing: Blessing, out: Path) -> None:
    """Puts the outcome on the table at the end of the run."""
    accuracy = evaluation.accuracy
    fact("test accuracy", accuracy, f"{accuracy:.4f} on {evaluation.examples:,} examples")
    fact("blessed", blessing.blessed, f"{'yes' if blessing.blessed else 'no'}: {blessing.reason}")
    for warning in blessing.warnings:
        say("validate", f"warning: {warning}")
    fact("report", str(out / model_store.REPORT_FILE))
    fact("exported model", str(out / model_store.SAVED_MODEL))
