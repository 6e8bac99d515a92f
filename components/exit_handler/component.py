"""The component for an exit handler. KFP embeds the source text of the function alone."""

from kfp import dsl


def exit_handler(
    status: dsl.PipelineTaskFinalStatus,
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
    job_resource_name: str = "",
    project: str = "",
    history_uri: str = "",
    notify_when: str = "failure",
    webhook_secret: str = "",
) -> None:
    """Records the outcome of a run, explains a failure, and sends a notification.

    A notification that cannot be sent is reported, and does not fail the task.

    Args:
        status: Outcome of the tasks inside the exit handler; KFP fills it in.
        job_name: Name of the run.
        job_resource_name: On the platform, `dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER`, to find the logs
            of a failed task; "" explains the error alone.
        project: Id of the project for reading logs; "" for the number in the run's resource name.
        history_uri: Directory or gs://, below which runs/JOB_NAME/run.json is written; "" writes none.
        notify_when: failure, always or never.
        webhook_secret: Secret with the webhook's URL in Secret Manager,
            projects/PROJECT/secrets/NAME/versions/latest; "" sends none.
    """
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("exit-handler"):
        from shardline.components.exit_handler import finish_run

        finish_run(
            state=status.state,
            error=status.error_message or "",
            job_name=job_name,
            job_resource_name=job_resource_name,
            project=project,
            history_uri=history_uri,
            notify={"when": notify_when, "webhook_secret": webhook_secret},
        )
