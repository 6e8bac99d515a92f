"""A study: the metric to optimize, the parameters to search, and how the search goes."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardline.components.tune.parameter import Parameter, read_parameter
from shardline.trainer.errors import SettingsError

GOALS = ("maximize", "minimize")
ALGORITHMS = ("", "RANDOM_SEARCH", "GRID_SEARCH")
MEASUREMENTS = ("BEST_MEASUREMENT", "LAST_MEASUREMENT")
#: Rules that stop a trial early, and how StudySpec writes them. The launcher drops messages without
#: content, so each needs a field that is not at its default: a rule by steps, which is what
#: use_elapsed_duration = false means, cannot be asked of the first two. 5 is the API's own default.
STOPPING: Mapping[str, dict[str, Any]] = {
    "": {},
    "median": {"median_automated_stopping_spec": {"use_elapsed_duration": True}},
    "decay_curve": {"decay_curve_stopping_spec": {"use_elapsed_duration": True}},
    "convex": {"convex_automated_stopping_spec": {"min_measurement_count": 5}},
}
_CHOICES = {
    "goal": GOALS,
    "algorithm": ALGORITHMS,
    "measurement_selection_type": MEASUREMENTS,
    "stopping": tuple(STOPPING),
}
_COUNTS = {"max_trial_count": 1, "parallel_trial_count": 1, "max_failed_trial_count": 0}


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a hyperparameter tuning job searches, and how.

    Attributes:
        metric: Metric of the trainer that is reported after each validation: val_accuracy, val_loss.
        parameters: What is searched.
        goal: One of `GOALS`.
        max_trial_count: Trials in all.
        parallel_trial_count: Trials at the same time; each has the whole cluster of the training step.
        max_failed_trial_count: Failed trials that end the study as failed; 0 leaves it to the platform.
        algorithm: One of `ALGORITHMS`; "" is the platform's Bayesian optimization.
        measurement_selection_type: Which of a trial's measurements counts, one of `MEASUREMENTS`.
        stopping: Rule that stops a trial early, one of `STOPPING`; "" for none.
    """

    metric: str
    parameters: tuple[Parameter, ...]
    goal: str = "maximize"
    max_trial_count: int = 10
    parallel_trial_count: int = 1
    max_failed_trial_count: int = 0
    algorithm: str = ""
    measurement_selection_type: str = "BEST_MEASUREMENT"
    stopping: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric or len(self.metric.split()) != 1:
            raise SettingsError(f"metric must be a metric of the trainer as in val_loss, got {self.metric!r}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                there = ", ".join(repr(choice) for choice in choices)
                raise SettingsError(f"{name} is one of {there}, got {getattr(self, name)!r}")
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SettingsError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.parallel_trial_count > self.max_trial_count:
            raise SettingsError(
                f"parallel_trial_count {self.parallel_trial_count} is more than max_trial_count "
                f"{self.max_trial_count}; lower it"
            )
        self._check_parameters()

    def _check_parameters(self) -> None:
        names = [parameter.name for parameter in self.parameters]
        if not names:
            raise SettingsError("a study needs at least one [[parameter]]")
        if twice := {name for name in names if names.count(name) > 1}:
            raise SettingsError(f"parameters are named once, got twice: {', '.join(sorted(twice))}")
        doubles = [parameter.name for parameter in self.parameters if parameter.type == "double"]
        if self.algorithm == "GRID_SEARCH" and doubles:
            raise SettingsError(
                f"GRID_SEARCH takes no parameter of type double: {', '.join(doubles)}; make it discrete"
            )

    @property
    def types(self) -> dict[str, str]:
        """Types of the parameters by name."""
        return {parameter.name: parameter.type for parameter in self.parameters}

    @property
    def spec(self) -> dict[str, Any]:
        """The study as StudySpec, in the API's snake_case."""
        return {
            "metrics": [{"metric_id": self.metric, "goal": self.goal.upper()}],
            "parameters": [parameter.spec for parameter in self.parameters],
            "algorithm": self.algorithm or "ALGORITHM_UNSPECIFIED",
            "measurement_selection_type": self.measurement_selection_type,
            **STOPPING[self.stopping],
        }


_KEYS = [item.name for item in fields(Study) if item.name != "parameters"]


def parse_study(text: str) -> dict[str, Any]:
    """Returns the content of a study file from JSON.

    Raises:
        SettingsError: When it is no JSON object.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"study is not JSON ({error}); it is a study file as a JSON object") from None
    if not isinstance(content, dict):
        raise SettingsError(f"study must be a JSON object, got {text!r}")
    return content


def read_study(content: Mapping[str, Any], *, max_trial_count: int = 0) -> Study:
    """Reads a study.

    Args:
        content: The study's fields, and the parameters as "parameter".
        max_trial_count: In the place of the study's own unless 0.

    Raises:
        SettingsError: When a key is unknown or missing, or a value is wrong.
    """
    for key in content:
        if key not in (*_KEYS, "parameter"):
            near = difflib.get_close_matches(key, [*_KEYS, "parameter"], n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join([*_KEYS, 'parameter'])}"
            raise SettingsError(f"unknown key {key}; {hint}")
    if "metric" not in content:
        raise SettingsError("metric is missing")
    tables = content.get("parameter", [])
    if not isinstance(tables, list):
        raise SettingsError(f"parameter must be a list of tables: [[parameter]], got {tables!r}")
    values = {key: content[key] for key in _KEYS if key in content}
    if max_trial_count:
        values["max_trial_count"] = max_trial_count
        values["parallel_trial_count"] = min(max_trial_count, values.get("parallel_trial_count", 1))
    return Study(parameters=tuple(read_parameter(table) for table in tables), **values)
