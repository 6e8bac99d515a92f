"""Model directory: what a validation writes, and a published version has.

A validation fills one directory:

    OUT/saved_model/      the exported model
    OUT/model.keras       the trained model it was made from, with the settings.json of its training
    OUT/transform/        what makes the model's inputs of the dataset's, where a transformation did it
    OUT/training.keys     what the training examples are known by, 8 bytes each, where the dataset says it
    OUT/model.tflite      the export converted for LiteRT, where it was asked for; model.int8.tflite, the same
                          with whole numbers of 8 bits inside, and model.onnx for ONNX
    OUT/profile.json      how the training data are distributed (`components.validate.metrics.drift`)
    OUT/export.json       what was exported (`Export`); written when all of these are complete
    OUT/evaluation.json   what was measured
    OUT/report.html       both, for a person
    OUT/model_card.html   what the model is for, takes, returns and is worth; also model_card.md
    OUT/blessing.json     the verdict; written last: without it, nothing was decided
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shardline.trainer.base import crash, files
from shardline.trainer.base.deserialize import load
from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.features import CLASS, LABEL, Label

SAVED_MODEL = "saved_model"
MODEL_FILE = "model.keras"
SETTINGS_FILE = "settings.json"
TFLITE_FILE = "model.tflite"
INT8_FILE = "model.int8.tflite"
ONNX_FILE = "model.onnx"
KEYS_FILE = "training.keys"
PROFILE_FILE = "profile.json"
EXPORT_FILE = "export.json"
EVALUATION_FILE = "evaluation.json"
REPORT_FILE = "report.html"
CARD_FILE = "model_card.html"
CARD_TEXT_FILE = "model_card.md"
BLESSING_FILE = "blessing.json"

# The verdict goes first. Model and settings are not listed: they may be those that are being validated.
_EARLIER = (
    *(BLESSING_FILE, REPORT_FILE, CARD_FILE, CARD_TEXT_FILE),
    *(EVALUATION_FILE, EXPORT_FILE, KEYS_FILE, PROFILE_FILE, ONNX_FILE, INT8_FILE, TFLITE_FILE),
)

#: How the headline of a verdict ends.
BLESSED, NOT_BLESSED = ": blessed", ": not registered"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a model was trained on, as far as a fair comparison with a later one needs it.

    Attributes:
        salt: Salt of the split; None where the dataset does not say it.
        shares: Shares of the splits.
        key: What the split follows from: path or content.
        rules: Settings that decide the split beside them, by name: stratify, group, split_by_time, split_gap.
        records: Number of keys in training.keys.
        keys: Fingerprint of these keys; "" where none are known.
        complete: Whether these are all; not where the training started from a model without known keys.
    """

    salt: int | None = None
    shares: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    rules: Mapping[str, Any] = field(default_factory=dict)
    records: int = 0
    keys: str = ""
    complete: bool = True


@dataclass(frozen=True, kw_only=True)
class Export:
    """Description of an export, the content of export.json; None where something was not done or is unknown.

    Attributes:
        labels: What the model predicts.
        deviations: Standard deviation of each number in training, by name of the label.
        quantiles: Shares of the quantiles that the model gives, by name of the label, of those of which it
            does.
        inputs: The model's inputs by name: a feature of the dataset each, with its "argument" in
            `serving_default`.
        signatures: By name, the "inputs" and "outputs" of each signature: "dtype" and "shape" by name.
        softmax_added: Whether the model returns logits of classes, and the export added a softmax.
        bytes: Size of the SavedModel in bytes.
        versions: Releases of the packages it was exported with, by name.
        settings: Content of the training's settings.json.
        compared_examples: Number of examples on which the export was compared with the model.
        max_difference: Largest difference on those examples, of a probability, or of a number in standard
            deviations.
        formats: What the export was converted into, by name.
        golden: Requests with their answers, by which a deployment is recognized as this model.
        training_data: What the model was trained on; None in exports of earlier releases, and where it was
            validated on another dataset.
    """

    fingerprint: str = ""
    labels: tuple[Label, ...] = ()
    deviations: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    quantiles: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    signatures: Mapping[str, Any] = field(default_factory=dict)
    softmax_added: bool = False
    parameters: int = 0
    bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    git_revision: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    compared_examples: int | None = None
    max_difference: float | None = None
    formats: Mapping[str, Any] | None = None
    golden: Mapping[str, Any] | None = None
    training_data: TrainingData | None = None

    def write(self, out: Path) -> None:
        """Writes export.json, which completes the export in `out`."""
        optional = ("compared_examples", "max_difference", "formats", "golden", "training_data")
        content = {k: v for k, v in asdict(self).items() if v is not None or k not in optional}
        files.write_json(out / EXPORT_FILE, {"format": "shardline.export", "format_version": 1, **content})

    @classmethod
    def read(cls, out: Path) -> Export:
        """Reads export.json, with defaults for what it lacks; raises ModelError as `read_part` does."""
        return read_part(out, EXPORT_FILE, cls)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes of the only label; () for numbers, and for several labels."""
        return self.labels[0].class_names if len(self.labels) == 1 else ()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What others read of evaluation.json; all of it is `shardline.components.validate.metrics.evaluation`.

    Attributes:
        split: The split that was measured on, which has so many `examples`.
        accuracy: Share of right predictions, 0..1; None where there is not one class.
        log_loss: Mean natural-log loss over the examples with finite outputs; None if there are none.
        class_names: Class names in the order of the labels; () of numbers.
        confusion: Examples by true class (row) and predicted class (column); () where there is not one class.
        label: Name of the label, as `kind` is its kind; "" of several.
        parts: The same of each of several labels.
    """

    fingerprint: str
    split: str
    examples: int
    metrics: Mapping[str, float | None]
    accuracy: float | None = None
    log_loss: float | None = None
    class_names: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    label: str = LABEL
    kind: str = CLASS
    parts: tuple[Measured, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What others read of blessing.json; all of it is `shardline.components.validate.gate.verdict`.

    Attributes:
        blessed: Whether the model may be published.
        reason: Reason for the verdict, in one sentence.
        headline: The verdict in a few words: "Worse than the champion by 4.8 points: not registered".
        champion: Version of the champion that the model was compared with; "" where there was none yet, None
            where no place for champions was given.
    """

    blessed: bool
    reason: str
    headline: str = ""
    champion: str | None = None

    @property
    def summary(self) -> str:
        """The headline without its ending; the reason in verdicts of earlier releases, which had none."""
        return self.headline.removesuffix(BLESSED).removesuffix(NOT_BLESSED) or self.reason


def clear(out: Path) -> None:
    """Makes `out` and removes an earlier validation from it, the verdict first.

    A verdict must never stand beside a model that it was not reached on, however this process ends.
    Raises SettingsError when `out` is a file or cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in _EARLIER:
            (out / name).unlink(missing_ok=True)
        if (out / SAVED_MODEL).exists():
            shutil.rmtree(out / SAVED_MODEL)
    except OSError as error:
        raise crash.output_error(
            error, f"cannot write to the output directory {out}: {error.strerror}; choose another one"
        ) from None


def read_part(exported: Path, name: str, kind: type[T]) -> T:
    """Reads a JSON file of a validation as a dataclass; raises ModelError when it is missing or damaged."""
    path, remedy = exported / name, "validate the model again"
    if not path.exists():
        raise ModelError(f"no {name} in {exported}: validation did not finish; {remedy}")
    return load(kind, path, ModelError, remedy)
