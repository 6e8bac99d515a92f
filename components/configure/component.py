"""The first and the last step of a run. KFP embeds the text of a function alone, so it imports inside."""

from typing import NamedTuple

from kfp import dsl


def configure(  # noqa: D417  # the settings are explained where their objects are defined
    history_uri: str,
    force: bool,
    deep: bool,
    scheduled: str,
    created: str,
    job_name: str,
    source: str,
    data_dir: str,
    labels: str,
    features: dict,  # type: ignore[type-arg]  # KFP reads the bare type as a JSON object
    label: str,
    columns: dict,  # type: ignore[type-arg]
    image_size: int,
    resize_mode: str,
    encoding: str,
    split: dict,  # type: ignore[type-arg]
    stratify: bool,
    key: str,
    group: str,
    split_by_time: str,
    split_gap: str,
    split_salt: int,
    seed: int,
    readers: int,
    shards: int,
    shard_size: int,
    compression: str,
    on_bad_record: str,
    max_bad_fraction: float,
    schema: str,
    on_anomaly: str,
    check_images: str,
    model: str,
    hparams: dict,  # type: ignore[type-arg]
    epochs: int,
    per_replica_batch_size: int,
    learning_rate: float,
    train_options: dict,  # type: ignore[type-arg]
    min_accuracy: float,
    rules: list,  # type: ignore[type-arg]
    first_run: str,
    champion_uri: str,
    formats: list,  # type: ignore[type-arg]
    worker_pool_specs: list = [],  # type: ignore[type-arg]  # noqa: B006
) -> NamedTuple(  # type: ignore[valid-type]
    "Outputs",
    [
        ("changed", bool),
        ("source", str),
        ("fingerprint", str),
        ("reason", str),
        ("state", str),
        ("still_blessed", bool),
        ("data", dict),
        ("training", dict),
        ("gate", dict),
    ],
):
    """Makes three objects of a run's parameters, and finds out whether there is anything to do.

    There is when data, settings or code have changed since the last run that is remembered. Everything from
    `source` on is a setting: a result depends on it.

    Args:
        history_uri: Directory or gs:// that remembers; "" remembers nothing, and everything is new.
        force: Whether the run shall train whatever is found.
        deep: Whether files are known by their content, not by names, sizes and times.
        scheduled: Time for which the run was scheduled, RFC 3339; anything else where it was not.
        created: Time at which the run was created, RFC 3339.
        job_name: Name of the run.

    Returns:
        changed: Whether there is something to do.
        source: The source with the date of the run in the place of {date}.
        fingerprint: Of data and code: a cached dataset of the same fingerprint is the same dataset.
        reason: Why there is something to do or not, in one line.
        state: What was found, for `record_run`.
        still_blessed: Whether the last run's model was blessed, where there is nothing to do.
        data: Fields of `shardline.components.preprocess.settings.PreprocessSettings`.
        training: Fields of `shardline.components.parameters.TrainingSettings`.
        gate: Fields of `shardline.components.parameters.GateSettings`.
    """
    given = dict(locals())
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("changes"):
        from shardline.components.configure.changes import look

        return look(**given)


def record_run(
    exported: dsl.Input[dsl.Model],
    state: str,
    reason: str,
    history_uri: str,
    champion_uri: str,
    job_name: str,
) -> None:
    """Remembers a run whose model was judged, and published where it was blessed.

    Args:
        exported: SavedModel with its evaluation and verdict.
        state: What `configure` found.
        reason: Why it found something to do.
        history_uri: Directory or gs:// that remembers; "" remembers nothing.
        champion_uri: Where a blessed model was published; "" published nothing.
        job_name: Name of the run.
    """
    from pathlib import Path

    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("changes"):
        from shardline.components.configure.history import remember

        remember(Path(exported.path), state, reason, history_uri, champion_uri, job_name)
