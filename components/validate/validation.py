"""Validation from a model file to a verdict: export, evaluate, compare with the champion, judge, report.

`validate` works on files, `validate_artifacts` on the artifacts of a pipeline's task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.html import page_path, relink_page
from shardline.components.model_store import Export, catalog
from shardline.components.validate.evaluate import Assessment, Examples, measure
from shardline.components.validate.export import predictions
from shardline.components.validate.export.export import export_model, take_samples
from shardline.components.validate.export.formats import REPRESENTATIVE, measure_formats
from shardline.components.validate.export.signatures import read_quantiles
from shardline.components.validate.gate.champion import ChampionEvaluation, TrainingKeys, evaluate_champion
from shardline.components.validate.gate.gate import Gate, GateSettings
from shardline.components.validate.gate.verdict import Blessing, judge
from shardline.components.validate.metrics.drift import add_drift
from shardline.components.validate.metrics.drift import warnings as drift_warnings
from shardline.components.validate.metrics.evaluation import Curve, Evaluation
from shardline.components.validate.report.model_card import ModelCard, make_card, read_training
from shardline.components.validate.report.report import Origin, render_report
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import read
from shardline.trainer.base.progress import fact, report
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.features import CLASS
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.models.saving import load_model, read_recorded_heads

# A task may write 131,072 bytes of parameters and artifacts; this leaves room for all the others.
_LARGEST_MATRIX_BYTES = 64 * 1024
# About as many points of each class's curve, for the same reason.
_POINTS = 30


@dataclass(frozen=True)
class Validation:
    """Outcome of a validation: what was measured, and the verdict on it."""

    evaluation: Evaluation
    blessing: Blessing

    @property
    def blessed(self) -> bool:
        """Whether the model may be published."""
        return self.blessing.blessed


def validate(
    model_file: Path,
    dataset: Path,
    out: Path,
    *,
    gate: Gate,
    champion_uri: str = "",
    formats: Sequence[str] = (),
    model_function: str = "",
    run: str = "",
) -> Validation:
    """Exports a model, measures the export on the test split, and decides whether it may be published.

    All input is checked before anything is written, except the examples themselves: where one of them
    cannot be read the evaluation ends, and there is an export without a verdict.

    Args:
        model_file: A model.keras; history.csv and settings.json of its training are used when beside it.
        dataset: Dataset directory.
        out: Output directory; `model_store` says what it holds afterwards. An earlier validation is replaced.
        gate: Rules that the model must pass.
        champion_uri: Where champions are published, a directory or gs://, for rules that compare with the
            champion; "" where there are none.
        formats: Formats into which the model is converted as well, and measured: "onnx", "tflite", "int8".
        model_function: The model function by which the model was built, whose module is imported for the
            classes that it registers; "" imports nothing but Shardline's own.
        run: Name of the run, for the report; "" outside of one.

    Raises:
        SettingsError: When a rule is about a class or feature that the dataset does not have, or about a
            champion without `champion_uri`, or `out` cannot be written to.
        DatasetError: When the dataset or its test split cannot be used.
        ModelError: When the model cannot be loaded or does not fit the dataset.
    """
    manifest = manifests.load(dataset)
    examples = Examples(dataset, manifest)
    gate.check(manifest, champion_uri, formats)
    gate = gate.for_labels(manifest.labels)
    if heads := read_recorded_heads(model_file):
        gate.check_quantiles(manifest.labels, read_quantiles(heads))
    if champion_uri:
        catalog.require_store(champion_uri)
    training = read_training(model_file)
    keys = TrainingKeys.of(dataset, manifest, start=training.initial_model, trained_on=training.fingerprint)
    with predictions.start() as clean:  # imports TensorFlow while the model is exported here
        export, loaded = export_trained(
            model_file,
            examples,
            out,
            formats=formats,
            model_function=model_function,
            settings=training.settings,
            training_keys=keys,
        )
        gate.check_quantiles(manifest.labels, export.quantiles)
        measured = _measure(out, export, loaded, clean, examples, gate.min_slice)
    challenge = ChampionEvaluation(measured.evaluation)
    if champion_uri:
        challenge = evaluate_champion(measured, champion_uri, examples, min_slice=gate.min_slice)
    own = keys.data is not None
    evaluation = add_drift(challenge.evaluation, dataset, manifest, out, challenge.profile, own=own)
    warnings = _warnings(manifest, evaluation, keys.warning, keys.describe_leak(examples), challenge.warning)
    blessing = judge(
        evaluation, gate, absence=challenge.absence, champion=challenge.champion, warnings=warnings
    )
    described = evaluation, blessing, manifest, export, training
    origin = Origin.of(model_file, training, run)
    files.write_text(out / model_store.REPORT_FILE, render_report(*described, origin=origin))
    card = make_card(manifest, export, training, evaluation, blessing.headline)
    _conclude(evaluation, blessing, card, out)
    return Validation(evaluation, blessing)


def export_trained(
    model_file: Path,
    examples: Examples,
    out: Path,
    *,
    formats: Sequence[str],
    model_function: str,
    **known: Any,
) -> tuple[Export, Any]:
    """Exports a model file, with what is `known` of its training, as `export_model` does."""
    report("validate", "loading the model")
    manifest, dataset, heads = examples.manifest, examples.directory, read_recorded_heads(model_file)
    # Only of a training that has not written down what the outputs are, the loss has to say it.
    model = load_model(model_file, function=model_function, compiled=heads is None)
    report("validate", "exporting the model")
    return export_model(
        model,
        manifest,
        out,
        model_file=model_file,
        samples=take_samples(manifest, dataset),
        formats=formats,
        representative=take_samples(manifest, dataset, REPRESENTATIVE, ["train"]) if formats else (),
        head=heads,
        **known,
    )


def _measure(
    out: Path,
    export: Export,
    loaded: Any,
    clean: predictions.CleanProcess,
    examples: Examples,
    min_slice: int,
) -> Assessment:
    """Measures an export, which a clean process is asked meanwhile, and what it was converted into."""
    report("validate", "asking the export in a process with TensorFlow alone")
    agreement = predictions.ask(clean, out)
    report("validate", f"evaluating the export on {examples.split.records:,} {examples.name} examples")
    measured = measure(
        out / model_store.SAVED_MODEL, examples, min_slice=min_slice, loaded=loaded, settle=agreement
    )
    golden = agreement()
    constant = examples.manifest.find_constant(examples.name)
    found = {
        "golden_difference": golden.difference,
        "constant_labels": len(constant),
        "leaked": examples.manifest.duplicates.straddling / examples.split.records,
    }
    if export.max_difference is not None:
        found["max_difference"] = export.max_difference
    notes = {"golden_difference": golden.words, "constant_labels": "; ".join(constant)}
    return measure_formats(out, export.formats or (), examples, measured.with_metrics(notes, **found))


def validate_artifacts(
    dataset: Any,
    model: Any,
    exported: Any,
    gate: Mapping[str, Any],
    *,
    metrics: Any,
    confusion: Any,
    sliced: Any,
    report: Any,
    run: str = "",
) -> tuple[bool, str]:
    """Validates the model of one task for the next; the artifacts are handed in, kfp is not imported.

    They are those of `component.export_validate`: the confusion matrix is written if it is small enough for a
    task's metadata, and of two classes the ROC curve of the second. Returns what the component does; raises
    ShardlineError as `validate` does.
    """
    out = Path(exported.path)
    settings = read(GateSettings, gate, "gate")
    model_file = Path(model.path) / "model.keras"
    outcome = validate(
        model_file,
        Path(dataset.path),
        out,
        gate=settings.gate,
        champion_uri=settings.champion_uri,
        formats=settings.formats,
        model_function=str(model.metadata.get("model_function", "")),
        run=run,
    )
    evaluation, blessed = outcome.evaluation, outcome.blessed
    exported.framework = "tensorflow"
    exported.metadata.update(blessed=blessed, quality=evaluation.quality, fingerprint=evaluation.fingerprint)
    _log(evaluation, metrics, confusion)
    curves = [curve for part in evaluation.each for curve in part.roc]
    # KFP 2.17's own methods for slices do not work: the attribute that they keep them in is never made.
    sliced.metadata["evaluationSlices"] = [
        {"slice": f"class={one.name}", "sliceClassificationMetrics": {"confidenceMetrics": _readings(one)}}
        for one in curves
    ]
    page = page_path(report)
    files.write_text(page, relink_page((out / model_store.REPORT_FILE).read_text(), out, page.parent))
    return blessed, evaluation.quality


def _warnings(manifest: Manifest, evaluation: Evaluation, *others: str) -> tuple[str, ...]:
    """Returns warnings that decide nothing, a sentence each; `others` come first, "" is none."""
    warnings = [other for other in others if other] + drift_warnings(evaluation)
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
            warnings.append(f"Without examples in training: {', '.join(unseen)}")
    if leaked := manifest.duplicates.straddling:
        warnings.append(
            f"{leaked:,} groups of equal examples lie in more than one split: the model may have seen its "
            "test; key=content keeps them together"
        )
    return tuple(warnings)


def _conclude(evaluation: Evaluation, blessing: Blessing, card: ModelCard, out: Path) -> None:
    """Writes the card, what was measured and, last, the verdict; reports them for the table of the run."""
    files.write_text(out / model_store.CARD_TEXT_FILE, card.to_markdown())
    files.write_text(out / model_store.CARD_FILE, card.to_html())
    files.write_json(out / model_store.EVALUATION_FILE, evaluation.to_json())
    files.write_json(out / model_store.BLESSING_FILE, asdict(blessing))
    reached = evaluation.quality
    fact("quality", reached, f"{reached} on {evaluation.examples:,} examples")
    fact("blessed", blessing.blessed, f"{'yes' if blessing.blessed else 'no'}: {blessing.words}")
    for rule in blessing.rules:
        if rule.verdict != "passed":
            report("validate", str(rule))
    for warning in blessing.warnings:
        report("validate", f"warning: {warning}")
    fact("report", str(out / model_store.REPORT_FILE))
    fact("model card", str(out / model_store.CARD_FILE))
    fact("exported model", str(out / model_store.SAVED_MODEL))


def _log(evaluation: Evaluation, metrics: Any, confusion: Any) -> None:
    """Writes the metrics, and what the console draws of the first label that is a class."""
    for name, value in evaluation.metrics.items():
        metrics.log_metric(name, value)
    told = next((part for part in evaluation.each if part.kind == CLASS), None)
    if told is None:
        return
    matrix = [list(row) for row in told.confusion]
    if len(json.dumps([told.class_names, matrix])) <= _LARGEST_MATRIX_BYTES:
        confusion.log_confusion_matrix(list(told.class_names), matrix)
    if len(told.class_names) == 2 and len(told.roc) == 2:
        curve = told.roc[1]
        confusion.log_roc_curve(list(curve.x), list(curve.y), list(curve.thresholds))


def _readings(curve: Curve) -> list[dict[str, float]]:
    """Returns a class's ROC curve as the schema of SlicedClassificationMetrics has it."""
    every = max(1, len(curve.x) // _POINTS)
    points = zip(curve.thresholds[::every], curve.y[::every], curve.x[::every], strict=True)
    return [
        {"confidenceThreshold": threshold, "recall": recall, "falsePositiveRate": false_positives}
        for threshold, recall, false_positives in points
    ]
