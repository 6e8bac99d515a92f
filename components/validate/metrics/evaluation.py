"""Evaluation of an exported model as plain values, and the metrics by name; needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardline.components import text
from shardline.components.model_store import Measured
from shardline.trainer.data.features import CLASS

#: A value's 95 % interval: its lower and its upper end.
Interval = tuple[float, float]

#: A slice with fewer examples is not judged, unless another number is asked for.
MIN_SLICE = 10


@dataclass(frozen=True)
class ClassScore:
    """How well one class is told from the others; what cannot be divided is 0."""

    name: str
    examples: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Slice:
    """The metric that counts first (accuracy, F1 or RMSE), on the examples with something in common.

    Its name is "class=healthy", "height=96..128" or "camera=left"; it is decided, and has an interval, where
    there are enough examples for a rule to be judged on.
    """

    name: str
    examples: int
    value: float
    decided: bool
    interval: Interval | None = None


@dataclass(frozen=True)
class NumberScore:
    """How well one number is told, in its unit.

    Attributes:
        bias: Mean of prediction minus truth.
        errors: Quantiles of prediction minus truth, by share: 0.05, 0.25, 0.5, 0.75, 0.95.
        points: (true, predicted) of some examples, drawn at random where there are many.
        calibration: (share, share of the truth not above it) of each quantile that a model gives.
    """

    name: str
    unit: str
    rmse: float
    mae: float
    bias: float
    errors: Mapping[str, float] = field(default_factory=dict)
    points: tuple[tuple[float, float], ...] = ()
    calibration: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Bin:
    """The examples whose highest probability lies above `lower` and up to `upper`; empty bins are left out.

    The mean of these probabilities is the confidence; a calibrated model's equals its accuracy.
    """

    lower: float
    upper: float
    examples: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Curve:
    """One class against all others, at every threshold of its probability; thinned to what an eye can see.

    `x` is the false positive rate of a ROC curve, or the recall; `y` the true positive rate, or the
    precision; `area` that under the unthinned curve, or the average precision.
    """

    name: str
    area: float
    x: tuple[float, ...]
    y: tuple[float, ...]
    thresholds: tuple[float, ...]


@dataclass(frozen=True)
class Lead:
    """Lead of a model over another in one metric, on the same examples, by paired bootstrap.

    `p` is the share of the paired resamples in which the other's value is as large or larger.
    """

    difference: float
    interval: Interval
    p: float


@dataclass(frozen=True)
class Baseline:
    """The trivial answer, which looks at nothing, its metrics on the same examples, and leads over it.

    It is the most frequent class in training, all of several labels, or the means of numbers in training.
    """

    answer: str
    metrics: Mapping[str, float]
    leads: Mapping[str, Lead]


@dataclass(frozen=True)
class Mistake:
    """One wrong prediction.

    Attributes:
        true: Name of the example's class, its labels or its numbers.
        probability: That of the predicted class; None when it was not finite or there is not one class.
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

    The distance is the largest difference of the shares below a number (Kolmogorov-Smirnov), or half the sum
    of the differences of the shares of each category (total variation); 0..1. Above the threshold it has
    moved.
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

    `value` is the metric that counts first; times are of one example; `max_difference` is the largest
    difference from the SavedModel's answers.
    """

    name: str
    value: float
    interval: Interval
    size_mb: float
    latency_p50_ms: float
    latency_p95_ms: float
    max_difference: float


@dataclass(frozen=True, kw_only=True)
class Evaluation(Measured):
    """Everything measured of an exported model, with every example of a split used once.

    It is that of the only label. Of several labels it has `parts`, an evaluation of each, and their metrics
    with the label's name before them: "sentiment.rmse".

    Attributes:
        mistakes: The wrong predictions that the model was surest of, surest first.
        metrics: Values by the names in METRICS; what could not be measured is left out.
        slices: By class, then by other features. The value of a class's slice is its recall.
        roc: ROC curves of the classes; of many classes, of those with the smallest area.
        leads: Leads over the champion by metric, COUNTED or of one class: "recall[class=healthy]".
        champion: The champion's evaluation on the same examples, without mistakes; None if not measured.
        notes: What else is known of a metric, by its name.
        left_out: Number of examples that are left out of the comparison, as the champion was trained on them.
        compared: The model's own evaluation on the others, without mistakes; None where none are left out.
        drift: Features of the training data beside those of the champion's, or in `no_drift` why not.
        skew: Features of the examples beside those of the training data.
        outputs: Names of its classes, or numbers.
    """

    non_finite: int = 0
    classes: tuple[ClassScore, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
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
    outputs: tuple[str, ...] = ()
    numbers: tuple[NumberScore, ...] = ()
    parts: tuple[Evaluation, ...] = ()

    @property
    def each(self) -> tuple[Evaluation, ...]:
        """The evaluation of each label."""
        return self.parts or (self,)

    def of(self, label: str) -> Evaluation:
        """Returns the evaluation of a label; "" is the only one."""
        return next((part for part in self.parts if part.label == label), self)

    @property
    def quality(self) -> str:
        """The metrics that count first, in words: "accuracy 0.9812", of several labels a list."""
        return text.quality(self.metrics)

    @property
    def beside_champion(self) -> Evaluation:
        """The evaluation on the examples on which the champion was measured too, with the champion's."""
        if self.compared is None:
            return self
        return replace(self.compared, champion=self.champion, leads=self.leads)

    @property
    def never_predicted(self) -> tuple[Slice, ...]:
        """Slices of the classes that have examples, and are never predicted."""
        found: list[Slice] = []
        for part in self.each:
            if part.kind == CLASS:
                columns = zip(part.class_names, zip(*part.confusion, strict=True), strict=True)
                missed = {f"class={name}" for name, column in columns if not any(column)}
            else:
                missed = {f"label={score.name}" for score in part.classes if not score.f1}
            found += (one for one in part.slices if one.name in missed and one.examples)
        return tuple(found)

    @property
    def blind_to(self) -> tuple[str, ...]:
        """Classes with at least MIN_SLICE examples that are never predicted."""
        found = [one for one in self.never_predicted if one.examples >= MIN_SLICE]
        return tuple(one.name.partition("=")[2] for one in found)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of evaluation.json: everything but the images."""
        content = asdict(self)
        for mistake in content["mistakes"]:
            del mistake["image"]
        for name in ("champion", "compared"):
            content[name] = (other := getattr(self, name)) and other.to_json()
        content["parts"] = [part.to_json() for part in self.parts]
        return content
