"""What was measured of an exported model: plain values that need neither TensorFlow nor Keras."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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
class Mistake:
    """One wrong prediction.

    Attributes:
        key: Of the example.
        true: Name of its class.
        predicted: Name of the class that the model gave.
        probability: That the model gave to the class it predicted; None when an output was not finite.
        image: The encoded image.
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

    def to_json(self) -> dict[str, Any]:
        """Returns the content of evaluation.json: everything but the images."""
        content = asdict(self)
        for mistake in content["mistakes"]:
            del mistake["image"]
        return content
