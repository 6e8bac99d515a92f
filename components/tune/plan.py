"""What the planning step does: the fields of a tuning job, from a study and a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardline.components.train.replica import check_options, program
from shardline.components.tune.study import parse_study, read_study, with_parameters
from shardline.components.vertex.pools import read_specs
from shardline.trainer.errors import SettingsError
from shardline.trainer.progress import say

#: The trainer's option that has a metric reported; its value is the study's.
METRIC_OPTION = "tuning_metric"
_PROGRAM = "shardline.components.tune.trial"


class Plan(NamedTuple):
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
    image: str,
    *,
    base_output_directory: str,
    labels: Mapping[str, str],
    max_trial_count: int,
    seed: int,
    options: Mapping[str, Any],
    **arguments: Any,
) -> Plan:
    """Returns the fields of a tuning job.

    Args:
        study: As `parse_study` takes it.
        worker_pool_specs: As `read_specs` takes them.
        image: Container image of replicas that name none.
        base_output_directory: Gets a directory for each trial.
        labels: Of the job, to which the seed is added.
        max_trial_count: In the place of the study's own unless 0.
        seed: Of the trials.
        options: Options of the trainer.
        **arguments: Further arguments of `shardline.components.train.replica.run`, and the dataset.

    Raises:
        SettingsError: When study, pools or options are wrong, or a parameter cannot be tuned.
    """
    searched = read_study(parse_study(study), max_trial_count=max_trial_count)
    check_tuned(searched.types, options)
    container = program(
        image,
        module=_PROGRAM,
        options={**options, METRIC_OPTION: searched.metric},
        parameters=searched.types,
        seed=seed,
        **arguments,
    )
    say(
        "tune",
        f"up to {searched.max_trial_count} trials {searched.goal} {searched.metric} "
        f"over {', '.join(searched.types)}",
    )
    return Plan(
        json.dumps(searched.spec),
        json.dumps(read_specs(worker_pool_specs).specs(container), ensure_ascii=False),
        searched.max_trial_count,
        searched.parallel_trial_count,
        searched.max_failed_trial_count,
        base_output_directory,
        json.dumps({**labels, "seed": str(seed)}),
    )


def check_tuned(types: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Checks that each parameter can be tuned.

    Args:
        types: Of the parameters by name.
        options: Of the trainer, beside them.

    Raises:
        SettingsError: When a setting belongs to the component or to the study.
    """
    own = ("epochs", "per_replica_batch_size", "learning_rate", "seed")
    chosen = with_parameters({"hparams": {}, "options": {}}, types)["options"]
    if METRIC_OPTION in (*chosen, *options):
        raise SettingsError(f"{METRIC_OPTION} is the study's metric; leave it out")
    check_options({**options, **chosen}, taken=own)
