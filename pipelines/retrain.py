"""The retraining pipeline."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from shardline.components.configure.component import record_run
from shardline.components.preprocess.component import finish_dataset, plan_shards, preprocess, write_shards
from shardline.components.train.component import check_worker_pools
from shardline.pipelines.settings import Settings
from shardline.pipelines.spec import RETRAIN
from shardline.pipelines.steps import (
    component_factory,
    configure_task,
    exit_task,
    make_pipeline,
    this_run,
)


def retrain_pipeline(settings: Settings) -> Any:
    """Returns the pipeline for one environment, as `dsl.pipeline` gives it."""
    hidden = () if settings.pools_at_run_time else ("worker_pool_specs",)
    return make_pipeline(
        RETRAIN,
        "From raw data to a registered model, if it is good enough.",
        retrain,
        settings,
        hidden=hidden,
    )


def retrain(  # noqa: D417  # the fields are explained in their dataclasses
    settings: Settings,
    train_and_register: Callable[..., dsl.PipelineTask],
    *,
    source: str = "digits",
    model: str = "mnist_cnn",
    preprocess_processes: int = 1,
    preprocess_tasks: int = 1,
    history_uri: str = "",
    force: bool = False,
    deep: bool = False,
    worker_pool_specs: list = [],  # type: ignore[type-arg]  # noqa: B006  # KFP reads type and default
    **flat: Any,
) -> None:
    """Retrains a model.

    1. Configure: the parameters become three objects, data, training and gate. Without any change since the
       last run that is remembered, the run ends here.
    2. Preprocess: the source becomes TFRecord shards with a manifest, in one task or in many.
    3. Train: a CustomJob of one chief and its workers.
    4. Export and validate: the exported model is judged on the test split.
    5. Register, if blessed: the model is uploaded and deployed if the settings say so, and then the champion.
    6. Record: the run is remembered.
    7. Conclude, whatever has happened: the run is explained, and whoever wants to know is told.

    Args:
        preprocess_processes: How many processes write the shards on one machine.
        preprocess_tasks: Over how many tasks, each with a machine of its own, the shards are spread.
        history_uri: Where runs are remembered; empty remembers none, and every run trains.
        force: Whether to train although nothing has changed.
        deep: Whether files are compared by content, not by names, sizes and times.
        worker_pool_specs: Machines of the training job, as the CustomJob API has them.
    """
    component = component_factory(settings)
    pools = {"worker_pool_specs": worker_pool_specs} if settings.pools_at_run_time else {}
    with dsl.ExitHandler(exit_task(settings, history_uri), name="run"):
        found = configure_task(
            settings,
            source=source,
            model=model,
            force=force,
            deep=deep,
            **this_run(history_uri),
            **flat,
            **pools,
        ).outputs

        def train_on(dataset: Any) -> None:
            judged = train_and_register(
                dataset=dataset, training=found["training"], gate=found["gate"], **pools
            )
            component(record_run)(
                exported=judged.output,
                state=found["state"],
                reason=found["reason"],
                champion_uri=flat["champion_uri"],
                **this_run(history_uri),
            ).set_caching_options(False)

        with dsl.If(found["changed"] == True, name="changed"):  # noqa: E712  # a KFP condition
            if pools:
                checked = component(check_worker_pools)(**pools, strategy=settings.train.strategy)
                pools["worker_pool_specs"] = checked.output
            data = {"data": found["data"], "processes": preprocess_processes}
            with dsl.If(preprocess_tasks <= 1, name="one-task"):
                preprocessed = component(preprocess)(fingerprint=found["fingerprint"], **data)
                train_on(preprocessed.outputs["dataset"])
            with dsl.Else(name="many-tasks"):
                train_on(_preprocess_in_tasks(settings, preprocess_tasks, data))


def _preprocess_in_tasks(settings: Settings, tasks: Any, data: dict[str, Any]) -> Any:
    """Adds the tasks that write a dataset together, and returns the dataset.

    They share a directory, which another run may be filling: none of them is cached.
    """
    component = component_factory(settings)
    planned = component(plan_shards)(tasks=tasks, **data).set_caching_options(False)
    directory = planned.outputs["planned"]
    with dsl.ParallelFor(planned.outputs["Output"], name="shards") as task:
        written = component(write_shards)(planned=directory, task=task, tasks=tasks).set_caching_options(
            False
        )
    finished = component(finish_dataset)(planned=directory).after(written).set_caching_options(False)
    return finished.outputs["dataset"]
