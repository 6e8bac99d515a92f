"""Studies: the metric to optimize, the parameters to search, and the program of a trial's replicas.

`python -m shardline.components.tune.study JSON --NAME=VALUE ...` is that program. JSON holds the
dataset's path, the training, the parameters' types, and the path of the user's packages; the platform adds a
flag for each parameter. The model goes to AIP_MODEL_DIR, which is another directory for each trial.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from shardline.components.custom_job import REDUCTION_SERVER_IMAGE
from shardline.components.train import can_be_tuned, read_training
from shardline.trainer.base import code, files
from shardline.trainer.base.deserialize import (
    Count,
    Natural,
    Rule,
    check_types,
    read_dataclass,
    restore_integers,
)
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.progress import exit_on_error, report

_MAX_VALUES = 1000
#: File of the trials' directory with the user's packages.
_CODE = "code"
#: The beginning of a placeholder other than the platform's own.
_PLACEHOLDER = re.compile(r"\{\{\$(?!\.pipeline_\w+\}\})|\{\{channel:")


@dataclass(frozen=True, kw_only=True)
class StudyParameter:
    """A parameter of the search, [[parameter]] of a study file, as settings/tune.toml shows."""

    name: Annotated[str, Rule("a word as in learning_rate", str.isidentifier)]
    type: Literal["double", "integer", "discrete", "categorical"]
    min: float | None = None
    max: float | None = None
    values: tuple[float | str, ...] = ()
    scale: Literal["", "linear", "log", "reverse_log"] = ""

    def __post_init__(self) -> None:
        low, high, values = self.min, self.max, list(self.values)
        if self.type in ("double", "integer"):
            if low is None or high is None or values:
                raise self._error(f"{self.type} takes min and max, two numbers, and no values")
            if low >= high:
                raise self._error(f"min must be below max, got {low} and {high}")
            if self.type == "integer" and not (isinstance(low, int) and isinstance(high, int)):
                raise self._error(f"min and max of an integer are whole numbers, got {low} and {high}")
        elif not 1 <= len(values) <= _MAX_VALUES or low is not None or high is not None:
            raise self._error(f"{self.type} takes values, 1 to {_MAX_VALUES} of them, and no min and max")
        texts = [value for value in values if isinstance(value, str)]
        if self.type == "categorical" and (len(texts) < len(values) or len(set(texts)) < len(texts)):
            raise self._error(f"values of a categorical are different texts, got {values}")
        if self.type == "discrete" and (texts or values != sorted(set(values))):
            raise self._error(f"values of a discrete are numbers in increasing order, got {values}")
        if self.scale and self.type == "categorical":
            raise self._error("a categorical has no scale; leave it out")
        least = low if low is not None else min(values, default=0)
        if self.scale in ("log", "reverse_log") and least <= 0:  # type: ignore[operator]  # a number
            raise self._error(f"scale {self.scale} needs values above 0, got {least}")

    @property
    def spec(self) -> dict[str, Any]:
        """The parameter as StudySpec.ParameterSpec, in the API's snake_case."""
        values: dict[str, Any] = {"values": list(self.values)}
        if self.type in ("double", "integer"):
            values = {"min_value": self.min, "max_value": self.max}
        scale = {"scale_type": f"UNIT_{self.scale.upper()}_SCALE"} if self.scale else {}
        return {"parameter_id": self.name, f"{self.type}_value_spec": values, **scale}

    def _error(self, text: str) -> SettingsError:
        return SettingsError(f"{self.name}: {text}")


def read_value(kind: str, text: str) -> float | int | str | bool:
    """Returns a value that the platform has chosen, from the text of --NAME=TEXT.

    `kind` is the parameter's type. Raises SettingsError when the text is not a number and should be.
    """
    if kind == "categorical":  # a text on the platform, also for a boolean setting of the trainer
        return {"true": True, "false": False}.get(text, text)
    try:
        value = float(text)
    except ValueError:
        raise SettingsError(f"the platform has chosen {text!r} where a number was expected") from None
    return int(value) if kind != "double" and value.is_integer() else value  # numbers travel as doubles


#: Rules of early stopping in StudySpec. The launcher drops messages without content: each needs a field that
#: is not at its default. A rule by steps, use_elapsed_duration = false, is thus impossible for the first two.
#: 5 is the API's own default.
STOPPING: Mapping[str, dict[str, Any]] = {
    "": {},
    "median": {"median_automated_stopping_spec": {"use_elapsed_duration": True}},
    "decay_curve": {"decay_curve_stopping_spec": {"use_elapsed_duration": True}},
    "convex": {"convex_automated_stopping_spec": {"min_measurement_count": 5}},
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study: the metric, parameters and search of a hyperparameter tuning job.

    The fields are the keys of a study file, which settings/tune.toml explains.
    """

    metric: Annotated[
        str, Rule("a metric of the trainer as in val_loss", lambda text: len(text.split()) == 1)
    ]
    parameter: tuple[StudyParameter, ...] = ()
    goal: Literal["maximize", "minimize"] = "maximize"
    max_trial_count: Count = 10
    parallel_trial_count: Count = 1
    max_failed_trial_count: Natural = 0
    algorithm: Literal["", "RANDOM_SEARCH", "GRID_SEARCH"] = ""
    measurement_selection_type: Literal["BEST_MEASUREMENT", "LAST_MEASUREMENT"] = "BEST_MEASUREMENT"
    stopping: Literal["", "median", "decay_curve", "convex"] = ""

    def __post_init__(self) -> None:
        check_types(self)
        if self.parallel_trial_count > self.max_trial_count:
            raise SettingsError(
                f"parallel_trial_count {self.parallel_trial_count} is more than max_trial_count "
                f"{self.max_trial_count}; lower it"
            )
        names = [parameter.name for parameter in self.parameter]
        if not names:
            raise SettingsError("a study needs at least one [[parameter]]")
        if twice := {name for name in names if names.count(name) > 1}:
            raise SettingsError(f"parameters are named once, got twice: {', '.join(sorted(twice))}")
        doubles = [parameter.name for parameter in self.parameter if parameter.type == "double"]
        if self.algorithm == "GRID_SEARCH" and doubles:
            raise SettingsError(
                f"GRID_SEARCH takes no parameter of type double: {', '.join(doubles)}; make it discrete"
            )

    @property
    def types(self) -> dict[str, str]:
        """Types of the parameters by name."""
        return {parameter.name: parameter.type for parameter in self.parameter}

    @property
    def spec(self) -> dict[str, Any]:
        """The study as StudySpec, in the API's snake_case."""
        return {
            "metrics": [{"metric_id": self.metric, "goal": self.goal.upper()}],
            "parameters": [parameter.spec for parameter in self.parameter],
            "algorithm": self.algorithm or "ALGORITHM_UNSPECIFIED",
            "measurement_selection_type": self.measurement_selection_type,
            **STOPPING[self.stopping],
        }


def parse_study(text: str) -> dict[str, Any]:
    """Returns the content of a study file from JSON; SettingsError when it is no JSON object."""
    content = files.parse_json(text, "study", SettingsError)
    if not isinstance(content, dict):
        raise SettingsError(f"study must be a JSON object, got {text!r}")
    return content


def read_study(content: Mapping[str, Any], *, max_trial_count: int = 0) -> Study:
    """Returns the study of a study file's fields; `max_trial_count` replaces its own, 0 leaves it.

    Raises SettingsError when a key is unknown or missing, or a value is wrong.
    """
    study = read_dataclass(Study, restore_integers(content))
    if not max_trial_count:
        return study
    fewer = min(max_trial_count, study.parallel_trial_count)
    return replace(study, max_trial_count=max_trial_count, parallel_trial_count=fewer)


def check_tuned(types: Mapping[str, str], tuning_metric: str = "") -> None:
    """Checks that each parameter of the study can be tuned, and that the trainer has no metric of its own.

    Raises SettingsError when a setting belongs to the component or to the study.
    """
    if tuning_metric or "tuning_metric" in types:
        raise SettingsError("tuning_metric is the study's metric; leave it out")
    if wrong := [name for name in types if not can_be_tuned(name)]:
        raise SettingsError(f"{wrong[0]} cannot be tuned: the pipeline sets it; leave it out")


class TuningJob(NamedTuple):
    """Fields of a HyperparameterTuningJob; study, pools and labels as JSON."""

    study_spec: str
    worker_pool_specs: str
    max_trial_count: int
    parallel_trial_count: int
    max_failed_trial_count: int
    base_output_directory: str
    labels: str


def plan_tuning_job(
    study: str,
    worker_pool_specs: Sequence[Any],
    *,
    dataset: Any,
    trials: Any,
    job_labels: Mapping[str, str],
    max_trial_count: int,
    trial_epochs: int,
    **training: Any,
) -> TuningJob:
    """Returns the fields of a tuning job; the arguments are those of the component `plan_study`.

    Raises SettingsError when study or training are wrong, or a parameter cannot be tuned.
    """
    searched = read_study(parse_study(study), max_trial_count=max_trial_count)
    training = restore_integers(training) | ({"epochs": trial_epochs} if trial_epochs else {})
    settings = read_training(training)
    check_tuned(searched.types, settings.tuning_metric)
    training["options"] = {**training["options"], "tuning_metric": searched.metric}
    arguments = {"dataset": dataset.path, "training": training, "parameters": searched.types}
    if held := code.unpacked_files():  # in a file: the job's launcher gets the arguments of all pools as one
        path = Path(trials.path) / _CODE
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, code.pack(held))
        arguments["code"] = str(path)
    argument = json.dumps(arguments, ensure_ascii=False)
    if found := _PLACEHOLDER.search(argument):  # the platform would fail on it, or replace it
        raise SettingsError(f"a parameter of the training holds {found[0]!r}, which begins a placeholder")
    pools: list[Any] = restore_integers({"pools": list(worker_pool_specs)})["pools"]
    for pool in pools:
        container = pool.get("container_spec", {})  # none in an empty slot
        if container and container["image_uri"] != REDUCTION_SERVER_IMAGE:
            container.update(command=["python3", "-m", "shardline.components.tune.study"], args=[argument])
    aim = f"{searched.goal} {searched.metric} over {', '.join(searched.types)}"
    report("tune", f"up to {searched.max_trial_count} trials {aim}")
    return TuningJob(
        json.dumps(searched.spec),
        json.dumps(pools, ensure_ascii=False),
        searched.max_trial_count,
        searched.parallel_trial_count,
        searched.max_failed_trial_count,
        trials.uri,
        json.dumps({**job_labels, "seed": str(settings.seed)}),
    )


def main(argument: str, flags: Sequence[str]) -> None:
    """Trains with the parameters of this trial, from its flags."""
    from kfp import dsl

    from shardline.components.train import train_replica

    trial = json.loads(argument)
    if "code" in trial:
        code.unpack(Path(trial["code"]).read_text(encoding="utf-8"))
    with exit_on_error("train"):
        tuned = read_flags(flags, trial["parameters"])
    dataset, model = dsl.Dataset(uri=trial["dataset"]), dsl.Model(uri="")
    train_replica(dataset=dataset, model=model, tuned=tuned, **trial["training"])


def read_flags(flags: Sequence[str], types: Mapping[str, str]) -> dict[str, Any]:
    """Returns the parameters of a trial by name, from its flags --NAME=VALUE.

    Raises SettingsError when a parameter is unknown, missing, or not a number and should be.
    """
    chosen = {}
    for flag in flags:
        name, _, text = flag.removeprefix("--").partition("=")
        if name not in types:
            raise SettingsError(f"the study has no parameter {name!r}; there are {', '.join(types)}")
        chosen[name] = read_value(types[name], text)
    if missing := [name for name in types if name not in chosen]:
        raise SettingsError(
            f"no value for {', '.join(missing)}: a trial receives --NAME=VALUE from its tuning job"
        )
    return chosen


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
