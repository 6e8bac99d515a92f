"""Trials of a tuning job: what their replicas run, planned by one step and run by the job.

`python -m shardline.components.tune.trial JSON --NAME=VALUE ...` is one replica's program. JSON holds the
dataset's path, the object `training` and the parameters' types; the platform adds a flag for each parameter.
The model goes to AIP_MODEL_DIR, which is another directory for each trial.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kfp import dsl

from shardline.components.train.replica import run
from shardline.components.train.settings import TrainingSettings
from shardline.components.tune.study import check_tuned, parse_study, read_study, read_value
from shardline.components.vertex.forms import check_text
from shardline.components.vertex.pools import REDUCTION_SERVER_IMAGE
from shardline.trainer.errors import SettingsError
from shardline.trainer.progress import errors_end_the_process, say
from shardline.trainer.records import read, restore_integers


class TuningJob(NamedTuple):
    """Fields of a HyperparameterTuningJob; study, pools and labels as JSON."""

    study_spec: str
    worker_pool_specs: str
    max_trial_count: int
    parallel_trial_count: int
    max_failed_trial_count: int
    base_output_directory: str
    labels: str


def plan(
    study: str,
    worker_pool_specs: Sequence[Any],
    *,
    dataset: str,
    training: Mapping[str, Any],
    base_output_directory: str,
    labels: Mapping[str, str],
    max_trial_count: int,
) -> TuningJob:
    """Returns the fields of a tuning job; the arguments are those of the component `plan_study`.

    Raises SettingsError when study or training are wrong, or a parameter cannot be tuned.
    """
    searched = read_study(parse_study(study), max_trial_count=max_trial_count)
    settings = read(TrainingSettings, training, "training")
    check_tuned(searched.types, settings.train_options)
    reporting = settings.with_tuned({"tuning_metric": searched.metric})
    arguments = {"dataset": dataset, "training": vars(reporting), "parameters": searched.types}
    argument = json.dumps(arguments, ensure_ascii=False)
    check_text("a parameter of the training", argument)
    pools: list[Any] = restore_integers({"pools": list(worker_pool_specs)})["pools"]
    for pool in pools:
        container = pool.get("container_spec", {})  # none in the slot of a pool that is not there
        if container and container["image_uri"] != REDUCTION_SERVER_IMAGE:
            container.update(command=["python3", "-m", __name__], args=[argument])
    say(
        "tune",
        f"up to {searched.max_trial_count} trials {searched.goal} {searched.metric} "
        f"over {', '.join(searched.types)}",
    )
    return TuningJob(
        json.dumps(searched.spec),
        json.dumps(pools, ensure_ascii=False),
        searched.max_trial_count,
        searched.parallel_trial_count,
        searched.max_failed_trial_count,
        base_output_directory,
        json.dumps({**labels, "seed": str(settings.seed)}),
    )


def main(argument: str, flags: Sequence[str]) -> None:
    """Trains with the parameters of this trial."""
    given = json.loads(argument)
    with errors_end_the_process("train"):
        tuned = read_flags(flags, given["parameters"])
    dataset, model = dsl.Dataset(uri=given["dataset"]), dsl.Model(uri="")
    run(dataset=dataset, model=model, training=given["training"], tuned=tuned)


def read_flags(flags: Sequence[str], types: Mapping[str, str]) -> dict[str, Any]:
    """Returns the parameters of a trial by name, from its flags --NAME=VALUE.

    Raises SettingsError when a parameter is unknown or missing, or is not the number that it should be.
    """
    chosen = {}
    for flag in flags:
        name, _, text = flag.removeprefix("--").partition("=")
        if name not in types:
            raise SettingsError(f"the study has no parameter {name!r}; there are {', '.join(types)}")
        chosen[name] = read_value(types[name], text)
    if missing := [name for name in types if name not in chosen]:
        raise SettingsError(
            f"no value for {', '.join(missing)}: a trial gets --NAME=VALUE from its tuning job"
        )
    return chosen


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
