"""The retraining pipeline."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from shardline.components.configure.component import record_run
from shardline.pipelines.settings import Settings
from shardline.pipelines.spec import RETRAIN
from shardline.pipelines.steps import (
    configure_task,
    exit_task,
    make_pipeline,
    on_machine,
    preprocess_tasks,
    rehearse_task,
    run_arguments,
)


def retrain_pipeline(settings: Settings) -> Any:
    """Returns the pipeline for one environment, as `dsl.pipeline` returns it."""
    description = "From raw data to a registered model, if it is good enough."
    return make_pipeline(RETRAIN, description, retrain, settings)


def retrain(  # noqa: D417  # the fields are explained in their dataclasses
    settings: Settings,
    train_and_register: Callable[..., dsl.PipelineTask],
    *,
    source: str = "digits",
    model: str = "mnist_cnn",
    preprocess_processes: int = 0,
    history_uri: str = "",
    continue_run: str = "",
    force: bool = False,
    **flat: Any,
) -> None:
    """Retrains a model.

    1. Configure: the parameters become three objects, data, training and gate. Without any change since the
       last run in the history, the run ends here.
    2. Preprocess: the source becomes TFRecord shards with a manifest, in one task or, by the settings, many.
    3. Rehearse: all later steps run on a few examples, before their machines cost money.
    4. Train: a CustomJob of one chief and its workers.
    5. Export and validate: the exported model is evaluated on the test split, and the gate decides.
    6. Register, if blessed: the model is uploaded and deployed if the settings say so, then the champion.
    7. Record: the run is written into the history.
    8. Conclude, always: the outcome is recorded, a failure explained, and a notification sent.

    Args:
        preprocess_processes: Number of processes that write the shards on one machine; 0 for one per core.
        history_uri: Directory or gs:// with the history of runs; empty for none, and every run trains.
        continue_run: Run whose checkpoints training continues from, or their directory; empty for none.
        force: Whether to train although nothing has changed.
    """
    component = on_machine(settings, settings.register.uncached())
    with dsl.ExitHandler(exit_task(settings, history_uri), name="run"):
        configured = configure_task(
            settings, source=source, model=model, force=force, history_uri=history_uri, **flat
        ).outputs
        objects = {"training": configured["training"], "gate": configured["gate"]}
        with dsl.If(configured["changed"] == True, name="changed"):  # noqa: E712  # a KFP condition
            dataset = preprocess_tasks(
                settings, configured["data"], preprocess_processes, fingerprint=configured["fingerprint"]
            )
            rehearsed = rehearse_task(
                settings,
                dataset=dataset,
                **objects,
                continue_run=continue_run,
                fingerprint=configured["fingerprint"],
                **run_arguments(history_uri),
            )
            validated = train_and_register(
                dataset=dataset, base_output_directory=rehearsed.outputs["Output"], **objects
            )
            component(record_run)(
                exported=validated.output,
                state=configured["state"],
                reason=configured["reason"],
                champion_uri=flat["champion_uri"],
                **run_arguments(history_uri),
            )
