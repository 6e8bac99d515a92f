"""Validation of a model file: export, evaluation, comparison with the champion, verdict, report.

`validate` works on files, `validate_artifacts` on the artifacts of a pipeline's task.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.html import page_path, relink_page
from shardline.components.model_store import Export
from shardline.components.model_store.champions import require_store
from shardline.components.text import enumerate_names
from shardline.components.validate.evaluate import Assessment, Examples, measure_export
from shardline.components.validate.export import signatures
from shardline.components.validate.export.export import export_model, take_samples
from shardline.components.validate.export.formats import measure_formats
from shardline.components.validate.gate import Blessing, TrainingKeys, evaluate_champion, judge, read_training
from shardline.components.validate.metrics import drift
from shardline.components.validate.metrics.evaluation import Evaluation
from shardline.components.validate.metrics.outcomes import MAX_CURVES
from shardline.components.validate.report import ModelCard, find_logs, make_card, render_report
from shardline.components.validate.rules import CHAMPION, NOT_MEASURED, OFF, Gate
from shardline.trainer import manifest as manifests
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import read_options
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.base.progress import fact, report
from shardline.trainer.manifest import CLASS, Manifest
from shardline.trainer.models import load_model, read_recorded_heads

# A task may write 131,072 bytes of parameters and artifacts; this leaves room for the others.
_MAX_MATRIX_BYTES = 64 * 1024
_MAX_MATRIX_CLASSES = math.isqrt(_MAX_MATRIX_BYTES // len("0, "))
# Points of each class's curve, approximately, for the same reason.
_CURVE_POINTS = 30
#: Metrics that only a validation measures: with a clean process, and on a whole dataset.
_ONLY_VALIDATED = ("golden_difference", "max_difference", "leaked", "constant_labels", "drifted")
# Intervals over fewer groups are wide.
_FEW_GROUPS = 10


@dataclass(frozen=True)
class Validation:
    """Outcome of a validation: the evaluation, and the verdict on it."""

    evaluation: Evaluation
    blessing: Blessing


def validate(
    model_file: Path,
    dataset: Path,
    out: Path,
    *,
    gate: Gate,
    model_function: str = "",
    run: str = "",
) -> Validation:
    """Exports a model, measures the export on the test split, and decides whether it may be published.

    All input except the examples is checked before anything is written. Where an example cannot be read,
    there is an export without a verdict.

    Args:
        model_file: A model.keras; history.csv and settings.json next to it, if any, describe its training.
        dataset: Dataset directory.
        out: Output directory, filled as `model_store` describes. An earlier validation is replaced.
        gate: Rules that the model must pass, and where the champion is that it is compared with.
        model_function: The model function that built the model; its module is imported, and registers its
            custom classes. "" imports only Shardline's own.
        run: Name of the run, for the report; "" outside of one.

    Raises:
        SettingsError: When a rule is about a class or feature that the dataset does not have, or about a
            champion without the gate's `champion_uri`, or `out` cannot be written to.
        DatasetError: When the dataset or its test split cannot be used.
        ModelError: When the model cannot be loaded or does not fit the dataset.
    """
    manifest = manifests.load(dataset)
    examples = Examples(dataset, manifest)
    rules = gate.for_dataset(manifest)
    if gate.champion_uri:
        require_store(gate.champion_uri)
    training = read_training(model_file)
    start, trained_on = training.options.get("initial_model"), training.settings.get("fingerprint")
    keys = TrainingKeys.of(dataset, manifest, start=str(start or ""), trained_on=str(trained_on or ""))
    with signatures.CleanProcess() as clean:  # imports TensorFlow while the model is exported here
        export, loaded = export_trained(
            model_file,
            examples,
            out,
            formats=gate.formats,
            model_function=model_function,
            settings=training.settings,
            training_keys=keys,
        )
        measured = _measure(out, export, loaded, clean, examples, gate.min_slice)
    champion = evaluate_champion(measured, gate.champion_uri, examples, rules=rules)
    evaluation = drift.add_drift(
        *(champion.evaluation, dataset, manifest, out, champion.profile), trained_on_it=keys.data is not None
    )
    warnings = _warnings(manifest, evaluation, keys.warning, keys.describe_leak(examples), champion.warning)
    blessing = judge(
        evaluation,
        rules,
        gate,
        missing=champion.missing,
        champion=champion.champion,
        warnings=warnings,
        training=training,
        champion_training=champion.training,
    )
    described = evaluation, blessing, manifest, export, training
    created, logs = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", find_logs(model_file, training, run)
    page = render_report(*described, created=created, run=run, logs=logs)
    files.write_text(out / model_store.REPORT_FILE, page)
    card = make_card(manifest, export, training, evaluation, blessing)
    _write_outcome(evaluation, blessing, card, out)
    return Validation(evaluation, blessing)


def try_gate(model_file: Path, examples: Examples, gate: Gate, model_function: str) -> None:
    """Exports and judges a model of one step on a few examples, in the model's directory.

    Raises ModelError where the champion cannot be compared with, SettingsError for a rule that can never be
    judged.
    """
    rules, out = gate.for_labels(examples.manifest.labels, examples.split), model_file.with_name("exported")
    export, loaded = export_trained(
        model_file, examples, out, formats=gate.formats, model_function=model_function
    )
    calls = 3  # the latencies are not reported
    saved_model = out / model_store.SAVED_MODEL
    measured = measure_export(saved_model, examples, loaded=loaded, min_slice=1, calls=calls)
    if export.formats:
        with signatures.CleanProcess() as clean:
            measured = measure_formats(out, export.formats, examples, measured, clean)
    champion = evaluate_champion(measured, gate.champion_uri, examples, calls=calls)
    needed = any(rule.reference == CHAMPION and rule.operator != OFF for rule in rules)
    if needed and champion.missing and not champion.missing.first:
        raise ModelError(f"the champion cannot be compared with: {champion.missing.reason}")
    # A class may be missing in so few examples, or the outputs after one step not be finite.
    missing = any(0 in tally.counts for tally in examples.split.labels.values())
    if missing or champion.evaluation.metrics.get("non_finite"):
        return
    for rule in judge(champion.evaluation, rules, gate, missing=champion.missing).rules:
        if rule.note == NOT_MEASURED and rule.metric not in _ONLY_VALIDATED:
            raise SettingsError(f"the rule {rule.rule!r} can never be judged: {rule.metric} is not measured")


def export_trained(
    model_file: Path,
    examples: Examples,
    out: Path,
    *,
    formats: Sequence[str],
    model_function: str,
    **options: Any,
) -> tuple[Export, Any]:
    """Loads and exports a model file; `options` and the result are those of `export_model`."""
    report("validate", "loading the model")
    manifest, dataset, heads = examples.manifest, examples.directory, read_recorded_heads(model_file)
    # Compiled only where the training has not recorded the heads: then the loss determines them.
    model = load_model(model_file, function=model_function, compiled=heads is None)
    report("validate", "exporting the model")
    return export_model(
        model,
        manifest,
        out,
        model_file=model_file,
        samples=take_samples(manifest, dataset),
        formats=formats,
        heads=heads,
        **options,
    )


def _measure(
    out: Path, export: Export, loaded: Any, clean: signatures.CleanProcess, examples: Examples, min_slice: int
) -> Assessment:
    report("validate", "sending golden examples to the export in a process with TensorFlow alone")
    agreement = signatures.ask_golden(clean, out)
    report("validate", f"evaluating the export on {examples.split.records:,} {examples.name} examples")
    measured = measure_export(
        out / model_store.SAVED_MODEL, examples, min_slice=min_slice, loaded=loaded, wait_until_idle=agreement
    )
    golden = agreement()
    constant = examples.manifest.find_constant(examples.name)
    metrics = {
        "golden_difference": golden.difference,
        "constant_labels": len(constant),
        "leaked": examples.manifest.duplicates.straddling / examples.split.records,
    }
    if export.max_difference is not None:
        metrics["max_difference"] = export.max_difference
    notes = {
        "golden_difference": golden.description,
        "constant_labels": enumerate_names(constant, separator="; "),
        "leaked": "" if examples.manifest.has_copies else "equal rows are chance, no copies",
    }
    measured = measured.with_metrics(notes, **metrics)
    return measure_formats(out, export.formats or (), examples, measured, clean)


def validate_artifacts(
    dataset: Any,
    model: Any,
    exported: Any,
    *,
    metrics: Any,
    confusion: Any,
    sliced: Any,
    report: Any,
    job_name: str = "",
    **gate: Any,
) -> bool:
    """Validates the artifacts of `component.export_validate`; returns whether the model is blessed.

    `gate` are its parameters rules, champion_uri and options.
    The confusion matrix is written if it fits into a task's metadata, and for two classes the ROC curve of
    the second. Raises ShardlineError as `validate` does.
    """
    out = Path(exported.path)
    model_file = Path(model.path) / "model.keras"
    outcome = validate(
        model_file,
        Path(dataset.path),
        out,
        gate=read_options(Gate, gate, "options"),
        model_function=str(model.metadata.get("model_function", "")),
        run=job_name,
    )
    evaluation, blessed = outcome.evaluation, outcome.blessing.blessed
    exported.framework = "tensorflow"
    exported.metadata.update(blessed=blessed, quality=evaluation.quality, fingerprint=evaluation.fingerprint)
    if not blessed:
        exported.metadata.update(reason=outcome.blessing.explain(), remedy=outcome.blessing.remedy)
    _log_metrics(evaluation, metrics, confusion, sliced)
    page = page_path(report)
    files.write_text(page, relink_page((out / model_store.REPORT_FILE).read_text(), out, page.parent))
    return blessed


def _warnings(manifest: Manifest, evaluation: Evaluation, *others: str) -> tuple[str, ...]:
    """Returns warnings that do not affect the verdict, a sentence each; `others` come first, "" is none."""
    warnings = [other for other in others if other] + drift.warnings(evaluation)
    if "train" in manifest.splits:
        trained, tested = (manifest.splits[name].labels for name in ("train", evaluation.split))
        unseen = [
            name
            for label in manifest.labels
            for name, before, now in zip(
                label.class_names, trained[label.name].counts, tested[label.name].counts, strict=True
            )
            if now and not before
        ]
        if unseen:
            warnings.append(f"Without examples in training: {enumerate_names(unseen)}")
    if manifest.split_column and not evaluation.groups:
        warnings.append(
            f"The split is by {manifest.split_column!r}, but the gate cannot read its values: intervals take "
            "examples as independent, and may be too narrow"
        )
    elif (groups := evaluation.groups) and groups.count < _FEW_GROUPS:
        warnings.append(
            f"The {evaluation.split} split has only {groups}, and chance makes large differences between so "
            "few: give it a larger share, or add data"
        )
    if leaked := manifest.duplicates.straddling:
        warnings.append(
            f"{leaked:,} groups of equal examples are in more than one split: the model may have seen its "
            "test examples; key=content keeps equal examples in one split"
        )
    return tuple(warnings)


def _write_outcome(evaluation: Evaluation, blessing: Blessing, card: ModelCard, out: Path) -> None:
    files.write_text(out / model_store.CARD_TEXT_FILE, card.to_markdown())
    files.write_text(out / model_store.CARD_FILE, card.to_html())
    files.write_json(out / model_store.EVALUATION_FILE, evaluation.to_json())
    files.write_json(out / model_store.BLESSING_FILE, asdict(blessing))
    quality, verdict = evaluation.quality, blessing.explain()
    for rule in blessing.rules:
        # The verdict's words tell of a default rule that is skipped, a warning of one that is off.
        if rule.verdict not in ("passed", "off", "skipped" if rule.name else "") and str(rule) not in verdict:
            report("validate", str(rule))
    for warning in blessing.warnings:
        report("validate", f"warning: {warning}")
    fact("blessed", blessing.blessed, verdict)
    fact("quality", quality, f"{quality} on {evaluation.sample}")
    fact("report", str(out / model_store.REPORT_FILE))
    if blessing.remedy:
        fact("next", blessing.remedy)
    fact("model card", str(out / model_store.CARD_FILE))
    fact("exported model", str(out / model_store.SAVED_MODEL))


def _log_metrics(evaluation: Evaluation, metrics: Any, confusion: Any, sliced: Any) -> None:
    for name, value in evaluation.metrics.items():
        metrics.log_metric(name, value)
    curves = sorted((curve for part in evaluation.each for curve in part.roc), key=lambda curve: curve.area)
    # KFP 2.17's own methods for slices fail: they never create the attribute that they use.
    sliced.metadata["evaluationSlices"] = slices = []
    for curve in curves[:MAX_CURVES]:
        every = max(1, len(curve.x) // _CURVE_POINTS)
        points = zip(curve.thresholds[::every], curve.y[::every], curve.x[::every], strict=True)
        names = ("confidenceThreshold", "recall", "falsePositiveRate")
        confidence = [dict(zip(names, point, strict=True)) for point in points]
        of_class = {"confidenceMetrics": confidence}
        slices.append({"slice": f"class={curve.name}", "sliceClassificationMetrics": of_class})
    part = next((part for part in evaluation.each if part.kind == CLASS), None)
    if part is None:
        return
    if (classes := len(part.class_names)) <= _MAX_MATRIX_CLASSES:
        matrix = [[0] * classes for _ in range(classes)]
        for true, predicted, examples in part.confusion:
            matrix[true][predicted] = examples
        if len(json.dumps([part.class_names, matrix])) <= _MAX_MATRIX_BYTES:
            confusion.log_confusion_matrix(list(part.class_names), matrix)
    if len(part.class_names) == 2 and len(part.roc) == 2:
        curve = part.roc[1]
        confusion.log_roc_curve(list(curve.x), list(curve.y), list(curve.thresholds))
