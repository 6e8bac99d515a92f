"""The first and the last step of a run. KFP embeds the text of a function alone, so it imports inside."""

from typing import Any, NamedTuple

from kfp import dsl


def detect_changes(
    source: str,
    model_function: str,
    label: str = "",
    image_size: int = 0,
    seed: int = 0,
    readers: int = 1,
    data_options: dict[str, Any] = {},
    hparams: dict[str, Any] = {},
    epochs: int = 20,
    per_replica_batch_size: int = 0,
    learning_rate: float = 0.0,
    train_options: dict[str, Any] = {},
    rules: list[str] = [],
    champion_uri: str = "",
    gate_options: dict[str, Any] = {},
    history_uri: str = "",
    force: bool = False,
    scheduled: str = "",
    created: str = "",
) -> NamedTuple(  # type: ignore[valid-type]
    "Outputs",
    [
        ("changed", bool),
        ("source", str),
        ("fingerprint", str),
        ("reason", str),
        ("state", str),
        ("still_blessed", bool),
    ],
):
    """Checks the settings of all steps, and detects changes of data, settings or code since the last run.

    The parameters up to `gate_options` are those of `preprocess`, `train` and `export_validate`.

    Args:
        history_uri: Directory or gs:// with the history of runs; "" for none, and every run trains.
        force: Whether to train without any change.
        scheduled: `dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER`; any other text without a schedule.
        created: `dsl.PIPELINE_JOB_CREATE_TIME_UTC_PLACEHOLDER`; "" for now.

    Returns:
        changed: Whether the run trains.
        source: The source with the date of the run instead of {date}.
        fingerprint: Fingerprint of data and code, by which a cached dataset is reused.
        reason: Why the run trains or not, in one line.
        state: State of data, settings and code, for `record_run`.
        still_blessed: Whether the last run's model was blessed, where nothing has changed.
    """
    arguments = dict(locals())
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("changes"):
        from shardline.components.changes import detect_changes

        return detect_changes(**arguments)


def record_run(
    exported: dsl.Input[dsl.Model],
    state: str,
    history_uri: str,
    champion_uri: str,
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
) -> None:
    """Records a run in the history once its model is validated, and published where it was blessed.

    Args:
        exported: SavedModel with its evaluation and verdict.
        state: Output `state` of `detect_changes`.
        history_uri: Directory or gs:// with the history of runs; "" records nothing.
        champion_uri: Model store of blessed models; "" for none.
        job_name: Name of the run.
    """
    from pathlib import Path

    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("changes"):
        from shardline.components.changes import write_history

        write_history(Path(exported.path), state, history_uri, champion_uri, job_name)
