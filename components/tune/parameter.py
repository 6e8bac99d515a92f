"""One tuned parameter: the values it may take, and how the platform writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardline.trainer.errors import SettingsError

TYPES = ("double", "integer", "discrete", "categorical")
#: Scales, and what StudySpec.ParameterSpec.ScaleType calls them.
SCALES = {
    "linear": "UNIT_LINEAR_SCALE",
    "log": "UNIT_LOG_SCALE",
    "reverse_log": "UNIT_REVERSE_LOG_SCALE",
}
_MOST_VALUES = 1000
#: Settings of the trainer that are true or false; a categorical value is text to the platform.
_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the search.

    Attributes:
        name: A setting of the trainer (learning_rate, per_replica_batch_size, ...), else a keyword argument
            of the model function.
        type: One of `TYPES`.
        min: Least value of a double or integer.
        max: Greatest value of a double or integer.
        values: Values of a discrete (numbers in increasing order) or categorical (texts).
        scale: One of `SCALES`; "" for the platform's default.
    """

    name: str
    type: str
    min: float | None = None
    max: float | None = None
    values: tuple[float | str, ...] = ()
    scale: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise SettingsError(f"a parameter's name is a word as in learning_rate, got {self.name!r}")
        if self.type not in TYPES:
            raise self._error(f"type is one of {', '.join(TYPES)}, got {self.type!r}")
        if self.type in ("double", "integer"):
            self._check_range()
        else:
            self._check_values()
        self._check_scale()

    @property
    def spec(self) -> dict[str, Any]:
        """The parameter as StudySpec.ParameterSpec, in the API's snake_case."""
        values: dict[str, Any] = {"values": list(self.values)}
        if self.type in ("double", "integer"):
            values = {"min_value": self.min, "max_value": self.max}
        scale = {"scale_type": SCALES[self.scale]} if self.scale else {}
        return {"parameter_id": self.name, f"{self.type}_value_spec": values, **scale}

    def _check_range(self) -> None:
        low, high = self.min, self.max
        if not _is_number(low) or not _is_number(high) or self.values:
            raise self._error(f"{self.type} takes min and max, two numbers, and no values")
        if low >= high:  # type: ignore[operator]  # two numbers
            raise self._error(f"min must be below max, got {low} and {high}")
        if self.type == "integer" and not (isinstance(low, int) and isinstance(high, int)):
            raise self._error(f"min and max of an integer are whole numbers, got {low} and {high}")

    def _check_values(self) -> None:
        if not 1 <= len(self.values) <= _MOST_VALUES or self.min is not None or self.max is not None:
            raise self._error(f"{self.type} takes values, 1 to {_MOST_VALUES} of them, and no min and max")
        if self.type == "categorical":
            if not all(isinstance(value, str) for value in self.values) or _repeats(self.values):
                raise self._error(f"values of a categorical are different texts, got {list(self.values)}")
        elif not all(map(_is_number, self.values)) or list(self.values) != sorted(set(self.values)):
            raise self._error(
                f"values of a discrete are numbers in increasing order, got {list(self.values)}"
            )

    def _check_scale(self) -> None:
        if self.scale not in ("", *SCALES):
            raise self._error(f"scale is one of {', '.join(SCALES)}, got {self.scale!r}")
        if self.scale and self.type == "categorical":
            raise self._error("a categorical has no scale; leave it out")
        least = self.min if self.min is not None else min(self.values, default=0)
        if self.scale in ("log", "reverse_log") and least <= 0:  # type: ignore[operator]  # a number
            raise self._error(f"scale {self.scale} needs values above 0, got {least}")

    def _error(self, text: str) -> SettingsError:
        return SettingsError(f"parameter {self.name}: {text}")


_KEYS = [item.name for item in fields(Parameter)]


def read_parameter(table: Any) -> Parameter:
    """Reads a [[parameter]] table of a study file.

    Raises:
        SettingsError: When a key is unknown or missing, or a value is wrong.
    """
    if not isinstance(table, Mapping):
        raise SettingsError(f"parameter must be a list of tables: [[parameter]], got {table!r}")
    for key in table:
        if key not in _KEYS:
            raise SettingsError(f"unknown key parameter.{key}; there are {', '.join(_KEYS)}")
    for key in ("name", "type"):
        if key not in table:
            raise SettingsError(f"parameter.{key} is missing in {dict(table)}")
    values = table.get("values", [])
    if not isinstance(values, list):
        raise SettingsError(f"parameter {table['name']}: values must be a list, got {values!r}")
    return Parameter(**{**table, "values": tuple(values)})


def read_value(kind: str, text: str) -> float | int | str | bool:
    """Reads a value that the platform has chosen, from text.

    Args:
        kind: The parameter's type.
        text: As in --NAME=TEXT.

    Raises:
        SettingsError: When a number is none.
    """
    if kind == "categorical":
        return _BOOLEANS.get(text, text)
    try:
        return _whole(float(text)) if kind != "double" else float(text)
    except ValueError:
        raise SettingsError(f"the platform has chosen {text!r} where a number was expected") from None


def _whole(value: Any) -> Any:
    """Returns a whole float as int: numbers travel as doubles."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _repeats(values: tuple[Any, ...]) -> bool:
    return len(set(values)) < len(values)
