"""The conclusion component, an exit handler. KFP embeds the source text of the function alone."""

from kfp import dsl


def conclude(
    status: dsl.PipelineTaskFinalStatus,
    job_name: str,
    job_resource_name: str,
    project: str = "",
    history_uri: str = "",
    notify_when: str = "failure",
    webhook_secret: str = "",
) -> None:
    """Records how a run came out, explains its failure, and tells whoever wants to know.

    A notification that cannot be sent is reported and fails nothing: the run is what it is.

    Args:
        status: How the tasks inside the exit handler came out; KFP fills it in.
        job_name: Name of the run, `dsl.PIPELINE_JOB_NAME_PLACEHOLDER`.
        job_resource_name: `dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER`.
        project: Id of the project, by which logs are found; "" for the number in the run's resource name.
        history_uri: Directory or gs://, below which runs/JOB_NAME/run.json is written; "" writes none.
        notify_when: failure, always or never.
        webhook_secret: Secret Manager's name of the webhook's URL,
            projects/PROJECT/secrets/NAME/versions/latest; "" for the variable SHARDLINE_WEBHOOK.
    """
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("conclude"):
        from shardline.components.conclude.notification import conclude_run

        conclude_run(
            state=status.state,
            error=status.error_message or "",
            job_name=job_name,
            job_resource_name=job_resource_name,
            project=project,
            history_uri=history_uri,
            notify_when=notify_when,
            webhook_secret=webhook_secret,
        )
