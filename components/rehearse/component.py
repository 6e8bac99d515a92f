"""The rehearsal component. KFP embeds the source text of the function alone, so it imports inside."""

from kfp import dsl


def rehearse(
    dataset: dsl.Input[dsl.Dataset],
    job: dsl.Output[dsl.Artifact],
    training: dict,  # type: ignore[type-arg]  # KFP reads the bare type as a JSON object
    gate: dict,  # type: ignore[type-arg]
    readers: int = 1,
    parameter_servers: int = 0,
    job_directory: str = "",
    continue_run: str = "",
    history_uri: str = "",
    fingerprint: str = "",
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
) -> str:
    """Tries on a few examples what a training job and the tasks after it will do, before it is paid for.

    Args:
        dataset: Dataset directory.
        job: Nothing is written there; its place is that of this run.
        training: What is trained, and how: the fields of
            `components.train.settings.TrainingSettings`.
        gate: When the model is good enough, and where it is published: the fields of
            `components.validate.gate.GateSettings`.
        readers: Replicas that will train; 0 where that is not known.
        parameter_servers: Replicas that will hold the variables.
        job_directory: Where the job keeps its checkpoints; "" for a directory beside this run's.
        continue_run: Run whose checkpoints the training goes on from, or their directory; "" begins anew.
        history_uri: Where runs are remembered; "" remembers none.
        fingerprint: What the dataset is known by in a cache, as `configure` gives it; "" for nothing.
        job_name: Name of the run.

    Returns:
        Where the job keeps its checkpoints, the same in all of its attempts: its base_output_directory.
    """
    given = dict(locals())
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("rehearse"):
        from shardline.components.rehearse.rehearsal import rehearse_run

        return rehearse_run(**given)
