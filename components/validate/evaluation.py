"""What was measured of an exported model: plain values that need neither TensorFlow nor Keras."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: A value's 95 % interval: its lower and its upper end.
Interval = tuple[float, float]

#: A slice with fewer examples is not judged, unless another number is asked for.
MIN_SLICE = 10

#: Metrics that are counted from right and wrong predictions: they have intervals, and leads.
COUNTED = ("accuracy", "macro_precision", "macro_recall", "macro_f1", "weighted_f1")


@dataclass(frozen=True)
class ClassScore:
    """How well one class is told from the others.

    Attributes:
        name: Of the class.
        examples: With this label.
        precision: Share of the examples predicted as this class that are of it; 0 if none was predicted.
        recall: Share of the examples of this class that were predicted as it; 0 if there are none.
        f1: Harmonic mean of the two.
    """

    name: str
    examples: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Slice:
    """How good a model is on some of the examples.

    Attributes:
        name: What they have in common: "class=healthy", "height=96..128", "camera=left".
        examples: How many there are.
        accuracy: Share of right predictions among them, 0..1.
        decided: Whether there are enough of them for a rule to be judged on.
        interval: Of the accuracy; None where it is not decided.
    """

    name: str
    examples: int
    accuracy: float
    decided: bool
    interval: Interval | None = None


@dataclass(frozen=True)
class Bin:
    """The examples whose highest probability lies between two values.

    Attributes:
        lower: Smallest probability, excluded but for the first bin.
        upper: Largest probability, included.
        examples: How many there are; bins without examples are left out.
        confidence: Mean of their highest probabilities.
        accuracy: Share of right predictions among them; a calibrated model's equals its confidence.
    """

    lower: float
    upper: float
    examples: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Curve:
    """One class against all others, at every threshold of its probability; thinned to what an eye can see.

    Attributes:
        name: Of the class.
        area: Under the unthinned curve (for precision and recall: average precision), 0..1.
        x: False positive rate of a ROC curve, recall of a precision-recall curve.
        y: True positive rate of a ROC curve, precision of a precision-recall curve.
        thresholds: Probability at each point. The first of a ROC curve and the last of a precision-recall
            curve stand for "above all probabilities" and are 1.
    """

    name: str
    area: float
    x: tuple[float, ...]
    y: tuple[float, ...]
    thresholds: tuple[float, ...]


@dataclass(frozen=True)
class Lead:
    """By how much a model is ahead of the champion in one metric, on the same examples.

    Attributes:
        difference: The model's value minus the champion's.
        interval: 95 % interval of the difference, by paired bootstrap.
        p: Share of the paired resamples in which the champion's value is as large or larger.
    """

    difference: float
    interval: Interval
    p: float


@dataclass(frozen=True)
class Mistake:
    """One wrong prediction.

    Attributes:
        key: Of the example.
        true: Name of its class.
        predicted: Name of the class that the model gave.
        probability: That the model gave to the class it predicted; None when an output was not finite.
        image: The encoded image; b"" for a row of a table.
    """

    key: str
    true: str
    predicted: str
    probability: float | None
    image: bytes = field(repr=False)


@dataclass(frozen=True)
class Evaluation:
    """What was measured of an exported model.

    Attributes:
        fingerprint: Of the dataset.
        split: Name of the split.
        examples: Number of examples, each of which was used once.
        accuracy: Share of right predictions, 0..1.
        log_loss: Mean natural-log loss over the examples with finite outputs; None if there are none.
        non_finite: Number of examples with an output that is not finite.
        class_names: In the order of the labels.
        classes: Per class, in that order.
        confusion: Examples by true class (row) and predicted class (column).
        mistakes: The wrong predictions that the model was surest of, surest first.
        metrics: Every single number by the name that rules use, see `shardline.components.validate.rules`;
            what could not be measured is left out. Times in milliseconds, sizes in MB (10^6 bytes),
            throughput in examples per second.
        intervals: 95 % bootstrap intervals of those metrics that have one.
        slices: By class, then by other features. The accuracy of a class's slice is its recall.
        calibration: Reliability by confidence, lowest first.
        roc: ROC curves of the classes; of many classes, of those with the smallest area.
        precision_recall: The same for precision over recall.
        leads: How far the model is ahead of that champion, by metric; only of metrics that are counted from
            right and wrong predictions. Of single classes as "recall[class=healthy]", as in `intervals`.
        champion: What was measured of the present champion on the same examples, without mistakes; None
            where there is none that could be measured.
    """

    fingerprint: str
    split: str
    examples: int
    accuracy: float
    log_loss: float | None
    non_finite: int
    class_names: tuple[str, ...]
    classes: tuple[ClassScore, ...]
    confusion: tuple[tuple[int, ...], ...]
    mistakes: tuple[Mistake, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    slices: tuple[Slice, ...] = ()
    calibration: tuple[Bin, ...] = ()
    roc: tuple[Curve, ...] = ()
    precision_recall: tuple[Curve, ...] = ()
    leads: Mapping[str, Lead] = field(default_factory=dict)
    champion: Evaluation | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the content of evaluation.json: everything but the images."""
        content = asdict(self)
        for mistake in content["mistakes"]:
            del mistake["image"]
        content["champion"] = self.champion and self.champion.to_json()
        return content
