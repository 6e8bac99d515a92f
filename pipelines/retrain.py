"""The retraining pipeline."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from shardline.components.configure.component import record_run
from shardline.components.preprocess.component import finish_dataset, plan_shards, preprocess, write_shards
from shardline.pipelines.settings import Settings
from shardline.pipelines.spec import RETRAIN
from shardline.pipelines.steps import (
    configure_task,
    exit_task,
    make_pipeline,
    on_machine,
    rehearse_task,
    run_arguments,
)


def retrain_pipeline(settings: Settings) -> Any:
    """Returns the pipeline for one environment, as `dsl.pipeline` gives it."""
    description = "From raw data to a registered model, if it is good enough."
    return make_pipeline(RETRAIN, description, retrain, settings)


def retrain(  # noqa: D417  # the fields are explained in their dataclasses
    settings: Settings,
    train_and_register: Callable[..., dsl.PipelineTask],
    *,
    source: str = "digits",
    model: str = "mnist_cnn",
    preprocess_processes: int = 0,
    preprocess_tasks: int = 1,
    history_uri: str = "",
    continue_run: str = "",
    force: bool = False,
    **flat: Any,
) -> None:
    """Retrains a model.

    1. Configure: the parameters become three objects, data, training and gate. Without any change since the
       last run that is remembered, the run ends here.
    2. Preprocess: the source becomes TFRecord shards with a manifest, in one task or in many.
    3. Rehearse: what comes next is tried on a few examples, before its machines are paid for.
    4. Train: a CustomJob of one chief and its workers.
    5. Export and validate: the exported model is judged on the test split.
    6. Register, if blessed: the model is uploaded and deployed if the settings say so, and then the champion.
    7. Record: the run is remembered.
    8. Conclude, whatever has happened: the run is explained, and whoever wants to know is told.

    Args:
        preprocess_processes: How many processes write the shards on one machine; 0 for one per core.
        preprocess_tasks: Over how many tasks, each with a machine of its own, the shards are spread.
        history_uri: Where runs are remembered; empty remembers none, and every run trains.
        continue_run: Run whose checkpoints the training goes on from, or their directory; empty begins anew.
        force: Whether to train although nothing has changed.
    """
    component = on_machine(settings, settings.register.uncached())
    with dsl.ExitHandler(exit_task(settings, history_uri), name="run"):
        found = configure_task(
            settings,
            source=source,
            model=model,
            force=force,
            **run_arguments(history_uri),
            **flat,
        ).outputs

        def train_on(dataset: Any) -> None:
            objects = {"training": found["training"], "gate": found["gate"]}
            rehearsed = rehearse_task(
                settings,
                dataset=dataset,
                **objects,
                continue_run=continue_run,
                fingerprint=found["fingerprint"],
                **run_arguments(history_uri),
            )
            judged = train_and_register(
                dataset=dataset, base_output_directory=rehearsed.outputs["Output"], **objects
            )
            component(record_run)(
                exported=judged.output,
                state=found["state"],
                reason=found["reason"],
                champion_uri=flat["champion_uri"],
                **run_arguments(history_uri),
            )

        with dsl.If(found["changed"] == True, name="changed"):  # noqa: E712  # a KFP condition
            data = {"data": found["data"], "processes": preprocess_processes}
            with dsl.If(preprocess_tasks <= 1, name="one-task"):
                made = on_machine(settings, settings.preprocess)(preprocess)
                train_on(made(fingerprint=found["fingerprint"], **data).outputs["dataset"])
            with dsl.Else(name="many-tasks"):
                train_on(_preprocess_in_tasks(settings, preprocess_tasks, data))


def _preprocess_in_tasks(settings: Settings, tasks: Any, data: dict[str, Any]) -> Any:
    """Adds the tasks that write a dataset together, and returns the dataset.

    They share a directory, which another run may be filling: none of them is cached.
    """
    component = on_machine(settings, settings.preprocess.uncached())
    planned = component(plan_shards)(tasks=tasks, **data)
    directory = planned.outputs["planned"]
    with dsl.ParallelFor(planned.outputs["Output"], name="shards") as part:
        written = component(write_shards)(planned=directory, part=part)
    finished = component(finish_dataset)(planned=directory).after(written)
    return finished.outputs["dataset"]
