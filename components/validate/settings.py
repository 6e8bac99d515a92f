"""The object `gate` of a run: when a model is good enough, and where it is published then."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.components.validate.gate import FIRST_RUN, Gate
from shardline.trainer.records import check_types


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """The object `gate`: when a model is good enough, and where it is published then.

    Attributes:
        min_accuracy: The least test accuracy of the exported model, 0..1; 0 for none.
        rules: Rules beside the gate's own, or, with a name, in their place: ["worst_slice(accuracy) >= 0.8",
            "champion: accuracy >= champion - 0.05", "classes: off"].
        first_run: What becomes of a model where there is no champion yet, or too few test examples: bless or
            block.
        champion_uri: Where a blessed model is published; empty publishes nothing.
        formats: What the exported model is converted into, and measured as: ["onnx", "tflite", "int8"].

    Raises:
        SettingsError: A value is of the wrong type or out of range, a rule cannot be read, or one is about a
            format that is not among these.
    """

    min_accuracy: float = 0.0
    rules: tuple[str, ...] = ()
    first_run: str = FIRST_RUN
    champion_uri: str = ""
    formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        self.gate.check_formats(self.formats)

    @property
    def gate(self) -> Gate:
        """The gate with all of these rules."""
        return Gate(first_run=self.first_run).with_min_accuracy(self.min_accuracy).with_rules(self.rules)
