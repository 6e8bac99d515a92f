"""The task that creates a hyperparameter tuning job and waits for it."""

from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp
from kfp import dsl

_LAUNCHER = "google_cloud_pipeline_components.container.v1.hyperparameter_tuning_job.launcher"
#: GCPC's own image, of the version that is installed.
_IMAGE = str(CustomTrainingJobOp.component_spec.implementation.container.image)


@dsl.container_component  # type: ignore[untyped-decorator]
def hyperparameter_tuning_job(
    gcp_resources: dsl.OutputPath(str),  # type: ignore[valid-type]
    display_name: str,
    study_spec: str,
    max_trial_count: int,
    parallel_trial_count: int,
    max_failed_trial_count: int,
    worker_pool_specs: str,
    base_output_directory: str,
    timeout: str,
    restart_job_on_worker_restart: bool,
    strategy: str,
    max_wait_duration: str,
    service_account: str,
    network: str,
    reserved_ip_ranges: list,  # type: ignore[type-arg]
    psc_interface_config: dict,  # type: ignore[type-arg]
    encryption_spec_key_name: str,
    tensorboard: str,
    persistent_resource_id: str,
    enable_web_access: bool,
    labels: str,
    project: str = "{{$.pipeline_google_cloud_project_id}}",
    location: str = "{{$.pipeline_google_cloud_location}}",
) -> dsl.ContainerSpec:
    """GCPC's HyperparameterTuningJobRunOp, with the same launcher, and with what that op leaves out.

    It has no field for early stopping, nor for the restart of a trial whose worker was lost, timeout,
    scheduling strategy, TensorBoard, persistent resource and labels; and importing it imports
    google.cloud.aiplatform, which takes seconds, whenever a pipeline is compiled.

    An empty text is left out of the request. max_wait_duration must be empty unless strategy is FLEX_START:
    the API refuses it, and other than the launcher of custom jobs, this one does not take it out.
    """
    return dsl.ContainerSpec(
        image=_IMAGE,
        command=["python3", "-u", "-m", _LAUNCHER],
        args=[
            "--type",
            "HyperparameterTuningJob",
            "--payload",
            dsl.ConcatPlaceholder(
                [
                    *('{"display_name": "', display_name, '"'),
                    *(', "study_spec": ', study_spec),
                    *(', "max_trial_count": ', max_trial_count),
                    *(', "parallel_trial_count": ', parallel_trial_count),
                    *(', "max_failed_trial_count": ', max_failed_trial_count),
                    *(', "trial_job_spec": {"worker_pool_specs": ', worker_pool_specs),
                    *(', "scheduling": {"timeout": "', timeout, '"'),
                    *(', "restart_job_on_worker_restart": ', restart_job_on_worker_restart),
                    *(', "strategy": "', strategy, '"'),
                    *(', "max_wait_duration": "', max_wait_duration, '"}'),
                    *(', "service_account": "', service_account, '"'),
                    *(', "network": "', network, '"'),
                    *(', "reserved_ip_ranges": ', reserved_ip_ranges),
                    *(', "psc_interface_config": ', psc_interface_config),
                    *(', "tensorboard": "', tensorboard, '"'),
                    *(', "persistent_resource_id": "', persistent_resource_id, '"'),
                    *(', "enable_web_access": ', enable_web_access),
                    *(', "base_output_directory": {"output_uri_prefix": "', base_output_directory, '"}}'),
                    *(', "labels": ', labels),
                    *(', "encryption_spec": {"kms_key_name": "', encryption_spec_key_name, '"}}'),
                ]
            ),
            *("--project", project, "--location", location, "--gcp_resources", gcp_resources),
        ],
    )
