"""Evaluation of an exported model as plain values, and the metrics by name; needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardline.components import text
from shardline.trainer.manifest import CLASS, LABEL

#: A value's 95 % interval: its lower and its upper end.
Interval = tuple[float, float]

#: Slices with fewer examples are not judged, unless the settings name another number.
MIN_SLICE = 10


@dataclass(frozen=True)
class ClassScore:
    """Precision, recall and F1 of one class; 0 where the denominator is 0."""

    name: str
    examples: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Slice:
    """The main metric (accuracy, F1 or RMSE) on the examples that have a value in common.

    Its name is "class=healthy", "height=96..128" or "camera=left"; it is decided, and has an interval, where
    it has enough examples to judge a rule. `effective` is the number of independent examples that tell as
    much as its own, which may belong to groups.
    """

    name: str
    examples: int
    value: float
    decided: bool
    interval: Interval | None = None
    effective: float = 0.0


@dataclass(frozen=True)
class Grouping:
    """Groups of examples that belong together; intervals and comparisons are over groups, not examples.

    The split is by group of a column, such as patient, or by time: then they are blocks of neighbours.
    """

    column: str
    by_time: bool
    count: int = 0

    def __str__(self) -> str:
        kind, of = ("block", "time") if self.by_time else ("group", repr(self.column))
        return f"{self.count:,} {kind}{'' if self.count == 1 else 's'} of {of}"


@dataclass(frozen=True)
class NumberScore:
    """Errors of one predicted number, in its unit.

    Attributes:
        bias: Mean of prediction minus truth.
        errors: Quantiles of prediction minus truth, by share: 0.05, 0.25, 0.5, 0.75, 0.95.
        points: (true, predicted) of some examples, drawn at random where there are many; () where it is not
            plotted, because there are many numbers.
    """

    name: str
    unit: str
    rmse: float
    mae: float
    bias: float
    errors: Mapping[str, float] = field(default_factory=dict)
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Bin:
    """The examples whose highest probability, on average `confidence`, is above `lower` and up to `upper`."""

    lower: float
    upper: float
    examples: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Curve:
    """Curve of one class against all others, over the thresholds of its probability; thinned for plotting.

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
    """Lead of a model over another in one metric, on the same examples.

    Attributes:
        difference: The model's value minus the other's.
        interval: Its 95 % interval, 2.5 % a side.
        p: One-sided p value of "it is not better": small where it is better beyond chance.
        error: Standard error of the difference.
        differ: Share of the examples, 0..1, that only one of the two answers rightly; None for a metric that
            is no share of examples.
        size: Effective number of examples of a share; of another metric, its degrees of freedom.
    """

    difference: float
    interval: Interval
    p: float
    error: float = 0.0
    differ: float | None = None
    size: float | None = None


@dataclass(frozen=True)
class BestLead:
    """Lead of a model over the best of some champions, for a rule about a slow regression.

    Attributes:
        version: Version of that champion; "" where the present champion is the best, or there is no other.
        compared: Number of champions of which it is the best, with the present one.
        value: Its metric on the same examples; None where none was measured.
        lead: The model's lead over it; None where none was measured.
        note: Why none was measured, or which of them could not be; "" for nothing.
    """

    version: str = ""
    compared: int = 1
    value: float | None = None
    lead: Lead | None = None
    note: str = ""


@dataclass(frozen=True)
class Baseline:
    """The same answer to every example, its metrics on the same examples, and the model's leads over it."""

    answer: str
    metrics: Mapping[str, float]
    leads: Mapping[str, Lead]


@dataclass(frozen=True)
class Mistake:
    """One wrong prediction.

    Attributes:
        true: Name of the example's class, its labels or its numbers.
        probability: That of the predicted class; None where it is not finite, or the label is no class.
        image: The encoded image; b"" for a row of a table.
        error: Prediction minus truth of a label of one number, else None.
        values: The columns of a row by name, as text; none for an image.
    """

    key: str
    true: str
    predicted: str
    probability: float | None
    image: bytes = field(repr=False)
    error: float | None = None
    values: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Drift:
    """Distance between the values of one feature in two sets of examples, 0..1.

    Of numbers it is the Kolmogorov-Smirnov distance, of categories the total variation distance. A feature
    has moved where it is above the threshold.
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
    """An export converted to another format, measured on the same examples from their pixels.

    `value` is the main metric; latencies are of one example; `max_difference` is the largest difference from
    the SavedModel's outputs.
    """

    name: str
    value: float
    interval: Interval | None
    size_mb: float
    latency_p50_ms: float
    latency_p95_ms: float
    max_difference: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All measurements of an exported model, on every example of a split once.

    With several labels, `parts` has an evaluation of each, and the metrics have the label's name before
    theirs: "sentiment.rmse".

    Attributes:
        split: The split that was measured.
        examples: Number of its examples.
        class_names: Class names in the order of the labels; () for numbers.
        confusion: Numbers of examples, (true class, predicted class, examples), without those of 0; () where
            the label is no class.
        label, kind: Name and kind of the label, "" where there are several.
        mistakes: The wrong predictions with the highest probability, highest first.
        metrics: Values by the names of metrics, without those that could not be measured.
        slices: By class, then by other features. The value of a class's slice is its recall.
        roc: ROC curves of the classes; of many classes, those with the smallest areas.
        leads: Leads over the champion by metric, also of one class: "recall[class=healthy]".
        champion: What is compared of the champion's evaluation on the same examples; None if not measured.
        best: Leads over the best of some champions, by metric as in `leads`.
        notes: Remarks on metrics, by name of the metric.
        left_out: Number of examples left out of the comparison, because the champion was trained on them.
        compared: The model's own evaluation on the others, without mistakes; None where none are left out.
        drift: Drift of the training data from the champion's; where it is empty, `no_drift` says why.
        skew: Drift of the examples from the training data.
        outputs: Names of its classes, or numbers.
        groups: Groups that the examples belong to, where the split is by group or time.
    """

    fingerprint: str
    split: str
    examples: int
    class_names: tuple[str, ...] = ()
    confusion: tuple[tuple[int, int, int], ...] = ()
    label: str = LABEL
    kind: str = CLASS
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
    best: Mapping[str, BestLead] = field(default_factory=dict)
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
    groups: Grouping | None = None

    @property
    def sample(self) -> str:
        """What was measured on: "1,000 examples in 20 groups of 'patient'"."""
        return f"{self.examples:,} examples" + (f" in {self.groups}" if self.groups else "")

    @property
    def each(self) -> tuple[Evaluation, ...]:
        """The evaluation of each label."""
        return self.parts or (self,)

    def of(self, label: str) -> Evaluation:
        """Returns the evaluation of a label; "" is the only one."""
        return next((part for part in self.parts if part.label == label), self)

    @property
    def quality(self) -> str:
        """The main metrics as text: "accuracy 0.9812"; a list for several labels."""
        return text.quality(self.metrics)

    @property
    def champion_comparison(self) -> Evaluation:
        """The evaluation on the examples on which the champion was measured, with the champion's."""
        if self.compared is None:
            return self
        return replace(self.compared, champion=self.champion, leads=self.leads, best=self.best)

    @property
    def never_predicted(self) -> tuple[Slice, ...]:
        """Slices of the classes that have examples but are never predicted."""
        slices: list[Slice] = []
        for part in self.each:
            if part.kind == CLASS:
                predicted = {part.class_names[column] for _, column, _ in part.confusion}
                missed = {f"class={name}" for name in part.class_names if name not in predicted}
            else:
                missed = {f"label={score.name}" for score in part.classes if not score.f1}
            slices += (item for item in part.slices if item.name in missed and item.examples)
        return tuple(slices)

    @property
    def blind_to(self) -> tuple[str, ...]:
        """Classes with at least MIN_SLICE examples that are never predicted."""
        slices = [item for item in self.never_predicted if item.examples >= MIN_SLICE]
        return tuple(item.name.partition("=")[2] for item in slices)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of evaluation.json: everything but images and rows of examples."""
        content = asdict(replace(self, champion=None, compared=None, parts=()))
        for mistake in content["mistakes"]:
            del mistake["image"], mistake["values"]
        for name in ("champion", "compared"):
            content[name] = (other := getattr(self, name)) and other.to_json()
        content["parts"] = [part.to_json() for part in self.parts]
        return content


def join(parts: tuple[Evaluation, ...], costs: Mapping[str, float]) -> Evaluation:
    """Returns the evaluation of all labels from those of each, with the `costs` of serving the model."""
    first = parts[0]
    if len(parts) == 1:
        return replace(first, metrics={**first.metrics, **costs})

    def prefixed(field: str) -> dict[str, Any]:
        items = ((part.label, getattr(part, field)) for part in parts)
        return {f"{label}.{name}": value for label, values in items for name, value in values.items()}

    return Evaluation(
        fingerprint=first.fingerprint,
        split=first.split,
        examples=first.examples,
        non_finite=max(part.non_finite for part in parts),
        label="",
        kind="",
        metrics={**prefixed("metrics"), **costs},
        intervals=prefixed("intervals"),
        parts=parts,
    )
