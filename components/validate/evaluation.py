"""Evaluation of an exported model as plain values, and the metrics by name; needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

#: A value's 95 % interval: its lower and its upper end.
Interval = tuple[float, float]

#: A slice with fewer examples is not judged, unless another number is asked for.
MIN_SLICE = 10


@dataclass(frozen=True)
class Metric:
    """One metric, by its name in rules and its label for a person.

    Attributes:
        text: Writes a value with its unit.
        rising: Whether more is better.
    """

    name: str
    label: str
    text: Callable[[float], str] = "{:.4f}".format
    rising: bool = True


_ms, _mb, _count = "{:,.2f} ms".format, "{:,.2f} MB".format, "{:,.0f}".format


def _tiny(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


QUALITY = (
    Metric("accuracy", "accuracy"),
    Metric("top5_accuracy", "top-5 accuracy"),
    Metric("macro_precision", "precision, mean of classes"),
    Metric("macro_recall", "recall, mean of classes"),
    Metric("macro_f1", "F1, mean of classes"),
    Metric("weighted_f1", "F1, weighted by examples"),
    Metric("log_loss", "log loss", rising=False),
    Metric("roc_auc", "ROC AUC"),
    Metric("pr_auc", "PR AUC"),
    Metric("ece", "calibration error (ECE)", rising=False),
)
SERVING = (
    Metric("latency_p50_ms", "latency of one example, median", _ms, rising=False),
    Metric("latency_p95_ms", "latency of one example, 95th percentile", _ms, rising=False),
    Metric("latency_batch32_p50_ms", "latency of 32 examples, median", _ms, rising=False),
    Metric("latency_batch32_p95_ms", "latency of 32 examples, 95th percentile", _ms, rising=False),
    Metric("throughput", "throughput", "{:,.0f} / s".format),
    Metric("size_mb", "size on disk", _mb, rising=False),
    Metric("peak_memory_mb", "peak memory", _mb, rising=False),
    Metric("max_difference", "largest difference from the trained model", _tiny, rising=False),
    Metric("batch_difference", "largest difference between batches", _tiny, rising=False),
    Metric("jpeg_flips", "predictions that JPEG changes", _percent, rising=False),
    Metric("shift_flips", "predictions that a shift by one pixel changes", _percent, rising=False),
)

CHECKS = (
    Metric("examples", "test examples", _count),
    Metric("non_finite", "examples with non-finite output", _count, rising=False),
    Metric("leaked", "groups of equal examples across splits, of test examples", _percent, rising=False),
    Metric("never_predicted", "classes that are never predicted", _count, rising=False),
    Metric("golden_difference", "largest difference in a clean process", _tiny, rising=False),
    Metric("drifted", "features whose distribution has moved", _count, rising=False),
)

#: Every metric that a rule may name; times are in milliseconds, sizes in MB, throughput in examples/s.
METRICS = tuple(metric.name for metric in QUALITY + SERVING + CHECKS)

#: Metrics that are measured of a new model only, and have no value of the champion's.
OF_THE_NEW = ("peak_memory_mb", "max_difference", "golden_difference", "leaked", "examples")

#: Metrics that are shares, 0..1, and those in which less is better.
SHARES = tuple(metric.name for metric in QUALITY if metric.name != "log_loss")
FALLING = tuple(metric.name for metric in QUALITY + SERVING + CHECKS if not metric.rising)

#: Metrics that are counted from right and wrong predictions: they have intervals, and leads.
COUNTED = ("accuracy", "macro_precision", "macro_recall", "macro_f1", "weighted_f1")

#: Metrics of a converted model, as in `accuracy[format=int8]`.
FORMAT_METRICS = ("accuracy", "size_mb", "latency_p50_ms", "latency_p95_ms", "max_difference")


@dataclass(frozen=True)
class ClassScore:
    """How well one class is told from the others.

    Attributes:
        examples: Number of examples with this label.
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
    """Accuracy, 0..1, on the examples with something in common.

    Attributes:
        name: What they have in common: "class=healthy", "height=96..128", "camera=left".
        decided: Whether there are enough of them for a rule to be judged on.
        interval: 95 % interval of the accuracy; None where it is not decided.
    """

    name: str
    examples: int
    accuracy: float
    decided: bool
    interval: Interval | None = None


@dataclass(frozen=True)
class Bin:
    """The examples whose highest probability lies above `lower` and up to `upper`; empty bins are left out.

    Attributes:
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
        area: Area under the unthinned curve (for precision and recall: average precision), 0..1.
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
    """Lead of a model over another in one metric, on the same examples, by paired bootstrap.

    Attributes:
        difference: The model's value minus the other's.
        interval: 95 % interval of the difference.
        p: Share of the paired resamples in which the other's value is as large or larger.
    """

    difference: float
    interval: Interval
    p: float


@dataclass(frozen=True)
class Baseline:
    """The trivial answer, which looks at nothing: for classes the most frequent one in training.

    Attributes:
        answer: What it always says: the name of a class.
        metrics: Its values on the same examples, by the names in COUNTED.
        leads: Leads of the model over it.
    """

    answer: str
    metrics: Mapping[str, float]
    leads: Mapping[str, Lead]


@dataclass(frozen=True)
class Mistake:
    """One wrong prediction.

    Attributes:
        true: Name of the example's class.
        probability: Probability of the predicted class; None when an output was not finite.
        image: The encoded image; b"" for a row of a table.
    """

    key: str
    true: str
    predicted: str
    probability: float | None
    image: bytes = field(repr=False)


@dataclass(frozen=True)
class Drift:
    """How far the values of one feature have moved from one set of examples to another.

    Attributes:
        feature: Name in a profile: a column, "label", "image brightness", "text length".
        distance: Largest difference of the shares below a number (Kolmogorov-Smirnov), or half the sum of the
            differences of the shares of each category (total variation); 0..1.
        threshold: Distance above which it has moved.
        moved: Whether it has.
        before: Values of the first set in a few words.
        after: Those of the second.
    """

    feature: str
    distance: float
    threshold: float
    moved: bool
    before: str
    after: str

    def __str__(self) -> str:
        by = f"distance {self.distance:.3f}, threshold {self.threshold:.3f}"
        return f"{self.feature}: {self.before} -> {self.after} ({by})"


@dataclass(frozen=True)
class Converted:
    """An export in another format, measured on the same examples from their pixels.

    Attributes:
        name: Name of the format.
        accuracy: Share of right predictions, 0..1, with its 95 % interval.
        size_mb: Size of the file.
        latency_p50_ms: Time of one example, median.
        latency_p95_ms: Time of one example, 95th percentile.
        max_difference: Largest absolute difference of a probability from the SavedModel's.
    """

    name: str
    accuracy: float
    interval: Interval
    size_mb: float
    latency_p50_ms: float
    latency_p95_ms: float
    max_difference: float


@dataclass(frozen=True)
class Evaluation:
    """Everything measured of an exported model, with every example of a split used once.

    Attributes:
        fingerprint: Fingerprint of the dataset.
        accuracy: Share of right predictions, 0..1.
        log_loss: Mean natural-log loss over the examples with finite outputs; None if there are none.
        non_finite: Number of examples with an output that is not finite.
        class_names: Class names in the order of the labels, which is also that of `classes`.
        confusion: Examples by true class (row) and predicted class (column).
        mistakes: The wrong predictions that the model was surest of, surest first.
        metrics: Values by the names in METRICS; what could not be measured is left out.
        intervals: 95 % bootstrap intervals of those metrics that have one.
        slices: By class, then by other features. The accuracy of a class's slice is its recall.
        calibration: Reliability by confidence, lowest first.
        roc: ROC curves of the classes; of many classes, of those with the smallest area.
        precision_recall: The same for precision over recall.
        leads: Leads over the champion by metric, COUNTED or of one class: "recall[class=healthy]".
        champion: The champion's evaluation on the same examples, without mistakes; None if not measured.
        notes: What else is known of a metric, by its name.
        baseline: The trivial answer on the same examples; None if not measured.
        left_out: Number of examples that are left out of the comparison, as the champion was trained on them.
        compared: The model's own evaluation on the others, without mistakes; None where none are left out.
        formats: The formats into which the export was converted as well.
        drift: Features of the training data beside those of the champion's.
        no_drift: Why they were not compared, or "".
        skew: Features of the examples beside those of the training data.
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
    notes: Mapping[str, str] = field(default_factory=dict)
    baseline: Baseline | None = None
    left_out: int = 0
    compared: Evaluation | None = None
    formats: tuple[Converted, ...] = ()
    drift: tuple[Drift, ...] = ()
    no_drift: str = ""
    skew: tuple[Drift, ...] = ()

    @property
    def beside_champion(self) -> Evaluation:
        """The evaluation on the examples on which the champion was measured too, with the champion's."""
        if self.compared is None:
            return self
        return replace(self.compared, champion=self.champion, leads=self.leads)

    @property
    def never_predicted(self) -> tuple[Slice, ...]:
        """Slices of the classes that have examples, and are never predicted."""
        said = {
            name
            for name, column in zip(self.class_names, zip(*self.confusion, strict=True), strict=True)
            if any(column)
        }
        by_class = {f"class={name}" for name in self.class_names if name not in said}
        return tuple(one for one in self.slices if one.name in by_class and one.examples)

    @property
    def blind_to(self) -> tuple[str, ...]:
        """Classes with at least MIN_SLICE examples that are never predicted."""
        found = [one for one in self.never_predicted if one.examples >= MIN_SLICE]
        return tuple(one.name.removeprefix("class=") for one in found)

    @property
    def parts(self) -> dict[str, float]:
        """Values of converted models and distances of features, by the left side of a rule about them."""
        of_formats = {
            f"{metric}[format={one.name}]": float(getattr(one, metric))
            for one in self.formats
            for metric in FORMAT_METRICS
        }
        return of_formats | {f"drift[{one.feature}]": one.distance for one in self.drift}

    def to_json(self) -> dict[str, Any]:
        """Returns the content of evaluation.json: everything but the images."""
        content = asdict(self)
        for mistake in content["mistakes"]:
            del mistake["image"]
        for name in ("champion", "compared"):
            content[name] = (other := getattr(self, name)) and other.to_json()
        return content
