"""Model store: the files of a validated model, which a published version has as well, and its records.

A validation fills one directory:

    OUT/saved_model/      the exported model
    OUT/model.keras       the trained model that was exported, with the settings.json of its training
    OUT/transform/        the transformation of the model's inputs, where training used one
    OUT/training.keys     keys of the training examples, 8 bytes each, where the dataset has keys
    OUT/model.onnx        the export converted to ONNX, if requested; model.tflite for LiteRT
    OUT/profile.json      distributions of the training data (`components.validate.metrics.drift`)
    OUT/export.json       description of the export (`Export`), written when all of these are complete
    OUT/evaluation.json   the evaluation
    OUT/report.html       report on the evaluation and the verdict
    OUT/model_card.html   use, inputs, outputs and quality of the model; also model_card.md
    OUT/blessing.json     the verdict, written last

It may import `storage` and `runs`; it knows no component.
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
from shardline.trainer.manifest import Label

SAVED_MODEL = "saved_model"
LITERT_FILE = "model.tflite"
ONNX_FILE = "model.onnx"
KEYS_FILE = "training.keys"
PROFILE_FILE = "profile.json"
EXPORT_FILE = "export.json"
EVALUATION_FILE = "evaluation.json"
REPORT_FILE = "report.html"
CARD_FILE = "model_card.html"
CARD_TEXT_FILE = "model_card.md"
BLESSING_FILE = "blessing.json"

# The verdict is removed first. Model and settings are not listed: they may be those under validation.
_CLEARED_FILES = (
    *(BLESSING_FILE, REPORT_FILE, CARD_FILE, CARD_TEXT_FILE),
    *(EVALUATION_FILE, EXPORT_FILE, KEYS_FILE, PROFILE_FILE, ONNX_FILE, LITERT_FILE),
)

#: How the headline of a verdict begins.
BLESSED, NOT_BLESSED = "Blessed: ", "Not blessed: "

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Record of the data that a model was trained on, for a fair comparison with a later model.

    Attributes:
        salt: Salt of the split; None where the dataset does not record it.
        shares: Shares of the splits.
        key: What is hashed to split: path or content.
        rules: Further settings of the split, by name: stratify, group, split_by_time, split_gap.
        records: Number of keys in training.keys.
        keys: Fingerprint of these keys; "" where none are known.
        complete: Whether all keys are known; False where the initial model had no known keys.
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
    """Description of an export, the content of export.json; None where a step was skipped or is unknown.

    Attributes:
        labels: Labels that the model predicts.
        deviations: Standard deviation of each number in training, by name of the label.
        inputs: The model's inputs by name: a feature of the dataset each, with its "argument" in
            `serving_default`.
        signatures: By name, the "inputs" and "outputs" of each signature: "dtype" and "shape" by name.
        softmax_added: Whether the model returns logits of classes, and the export added a softmax.
        bytes: Size of the SavedModel in bytes.
        versions: Versions of the packages that exported it, by name.
        settings: Content of the training's settings.json.
        compared_examples: Number of examples on which the export was compared with the model.
        max_difference: Largest difference on those examples, of a probability, or of a number in standard
            deviations.
        formats: Records of the converted formats, by name.
        golden: Requests with their predictions, which verify that a deployment serves this model.
        training_data: Data that the model was trained on; None where it was validated on another dataset.
    """

    fingerprint: str = ""
    labels: tuple[Label, ...] = ()
    deviations: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
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
        files.write_json(out / EXPORT_FILE, asdict(self))

    @classmethod
    def read(cls, out: Path) -> Export:
        """Reads export.json, with defaults for missing fields; raises ModelError as `read_part` does."""
        return read_part(out, EXPORT_FILE, cls)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Fields of blessing.json that are read outside of validation; `Blessing` there has the others.

    Attributes:
        blessed: Whether the model may be published.
        reason: Reason for the verdict, in one sentence.
        headline: The verdict in short: "Not blessed: 4.8 points worse than the champion".
        champion: Version of the champion that the model was compared with; "" where there was none yet, None
            where no champion_uri was set.
        blocked_by: Rules that block the model: the name of a default rule, else the rule as it was written.
        undecided: Whether too few examples left a rule open; such a model is blessed or blocked by policy.
        metrics: The metrics of all examples, by name.
        remedy: What may help the model, in words; "" for nothing known.
    """

    blessed: bool
    reason: str
    headline: str = ""
    champion: str | None = None
    blocked_by: tuple[str, ...] = ()
    undecided: bool = False
    remedy: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The headline without its beginning."""
        return self.headline.removeprefix(BLESSED).removeprefix(NOT_BLESSED)


def clear(out: Path) -> None:
    """Creates `out`, or removes an earlier validation from it, the verdict first.

    A directory never has a verdict on another model, even if this process is killed. Raises SettingsError
    when `out` is a file or cannot be written to.
    """
    with crash.output_errors(f"write to the output directory {out}", "choose another one"):
        out.mkdir(parents=True, exist_ok=True)
        for name in _CLEARED_FILES:
            (out / name).unlink(missing_ok=True)
        if (out / SAVED_MODEL).exists():
            shutil.rmtree(out / SAVED_MODEL)


def read_part(exported: Path, name: str, kind: type[T]) -> T:
    """Reads a JSON file of a validation as a dataclass; raises ModelError when it is missing or damaged."""
    path, remedy = exported / name, "validate the model again"
    if not path.exists():
        raise ModelError(f"no {name} in {exported}: validation did not finish; {remedy}")
    return load(kind, path, ModelError, remedy)
