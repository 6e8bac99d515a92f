"""The rehearsal component. KFP embeds the source text of the function alone, so it imports inside."""

from typing import Any

from kfp import dsl


def rehearse(
    dataset: dsl.Input[dsl.Dataset],
    job: dsl.Output[dsl.Artifact],
    model_function: str,
    hparams: dict[str, Any] = {},
    epochs: int = 20,
    per_replica_batch_size: int = 0,
    learning_rate: float = 0.0,
    seed: int = 0,
    train_options: dict[str, Any] = {},
    rules: list[str] = [],
    champion_uri: str = "",
    gate_options: dict[str, Any] = {},
    readers: int = 1,
    parameter_servers: int = 0,
    job_directory: str = "",
    continue_run: str = "",
    history_uri: str = "",
    fingerprint: str = "",
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
) -> str:
    """Runs training, export and gate on a few examples, before the training job is paid for.

    The parameters from `model_function` to `gate_options` are those of `train` and `export_validate`.

    Args:
        dataset: Dataset directory.
        job: Nothing is written there; its path names the directory of this run.
        readers: Replicas that will train; 0 where that is not known.
        parameter_servers: Replicas that will hold the variables.
        job_directory: Directory for the job's checkpoints; "" for a directory next to this run's.
        continue_run: Run whose checkpoints the training continues from, or their directory; "" starts anew.
        history_uri: Directory for the history of runs; "" keeps none.
        fingerprint: Key of the dataset in the cache, from `detect_changes`; "" for none.
        job_name: Name of the run.

    Returns:
        Directory of the job's checkpoints, the same in all of its attempts: its base_output_directory.
    """
    arguments = dict(locals())
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("rehearse"):
        from shardline.components.rehearse.rehearsal import rehearse_run

        return rehearse_run(**arguments)
