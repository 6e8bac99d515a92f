"""The tasks of our pipelines: components with the image, machines, retries and caching of the settings."""

from typing import Any

from google_cloud_pipeline_components.v1.vertex_notification_email import VertexNotificationEmailOp
from kfp import dsl

from shardline.components import with_image
from shardline.components.custom_job import TaskMachine
from shardline.components.register.component import PROJECT, deploy_tasks, upload_task
from shardline.components.train.component import custom_job
from shardline.components.tune.component import tuning_job
from shardline.pipelines.settings import Settings

_JOB_NAME = {"job_name": dsl.PIPELINE_JOB_NAME_PLACEHOLDER}


class Tasks:
    """Adds tasks to the pipeline that is being defined, one for each step; inputs are those of its component.

    A task that compares with what is there at the time of a run, or comes after one, is never cached.
    """

    def __init__(self, settings: Settings, pipeline: str) -> None:
        self._settings, self._pipeline = settings, pipeline
        self._components = with_image(settings.image, packages=settings.code.packages)
        self._small = settings.register.uncached()
        self._readers = settings.train.cluster.replica_count

    def detect_changes(self, **inputs: Any) -> dsl.PipelineTask:
        """Checks all settings, and compares them, the data and the code with those of the last run."""
        times = {
            "scheduled": dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER,
            "created": dsl.PIPELINE_JOB_CREATE_TIME_UTC_PLACEHOLDER,
        }
        return self._task("detect_changes", self._small, readers=self._readers, **times, **inputs)

    def preprocess(self, *, fingerprint: Any = None, **inputs: Any) -> Any:
        """Writes the dataset, which is returned, in one task or in as many as the settings say.

        One task is cached by the `fingerprint` of its data. Many share a directory that another run may be
        writing to: none of them is cached.
        """
        machine, tasks = self._settings.preprocess, self._settings.preprocess.tasks
        inputs["readers"] = self._readers
        if tasks == 1 and fingerprint is not None:
            written = self._task("preprocess", machine, fingerprint=fingerprint, **inputs)
            return written.outputs["dataset"]
        uncached = machine.uncached()
        if tasks == 1:
            return self._task("preprocess", uncached, **inputs).outputs["dataset"]
        planned = self._task("plan_shards", uncached, tasks=tasks, **inputs)
        directory = planned.outputs["planned"]
        with dsl.ParallelFor(planned.outputs["Output"], name="shards") as part:
            written = self._task("write_shards", uncached, planned=directory, part=part)
        return self._task("finish_dataset", uncached, planned=directory).after(written).outputs["dataset"]

    def rehearse(self, **inputs: Any) -> dsl.PipelineTask:
        """Runs the later steps on a few examples; its output is the directory of the training job."""
        servers = self._settings.train.cluster.parameter_servers
        return self._task(
            "rehearse",
            self._settings.validate.uncached(),
            readers=self._readers,
            parameter_servers=servers.replica_count if servers else 0,
            job_directory=self._settings.train.base_output_directory,
            **inputs,
        )

    def train(self, **inputs: Any) -> dsl.PipelineTask:
        """Trains on the whole cluster, in a CustomJob."""
        component = self._components.train
        return custom_job(component, self._settings.train, {"pipeline": self._pipeline})(**inputs)

    def export_validate(self, **inputs: Any) -> dsl.PipelineTask:
        """Exports a model and judges it; its output is whether it is blessed."""
        return self._task("export_validate", self._settings.validate.uncached(), **inputs)

    def register(self, **inputs: Any) -> dsl.PipelineTask:
        """Publishes a blessed model as the champion, once it is uploaded and deployed as the settings say."""
        registered = self._task("register", self._small, **inputs)
        upload, deploy = self._settings.model_upload, self._settings.deploy
        if upload:
            ready = self._task(
                "serving_model",
                self._small,
                image_uri=upload.serving_image_uri,
                pipeline=self._pipeline,
                parent_model=upload.parent_model,
                endpoint=deploy.endpoint if deploy else "",
                **inputs,
            )
            tasks = [upload_task(upload, ready, self._pipeline)]
            if deploy:
                tasks += deploy_tasks(deploy, tasks[0], upload.display_name, self._pipeline)
            for task in tasks:
                self._small.schedule(task)
            registered.after(tasks[-1])
        return registered

    def record_run(self, **inputs: Any) -> dsl.PipelineTask:
        """Writes the run into the history."""
        return self._task("record_run", self._small, **inputs)

    def exit_handler(self, history_uri: Any) -> dsl.PipelineTask:
        """Records the outcome of a run and notifies, also of a failure; the task of an exit handler."""
        notify = self._settings.notify
        if notify.emails:
            return VertexNotificationEmailOp(recipients=list(notify.emails))
        component = self._components.exit_handler
        component.component_spec.implementation.container.env = self._settings.tracking.environment
        return component(
            job_resource_name=dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER,
            project=PROJECT,
            notify_when=notify.when,
            webhook_secret=notify.webhook_secret,
            history_uri=history_uri,
            **_JOB_NAME,
        ).set_caching_options(False)

    def plan_study(self, **inputs: Any) -> dsl.PipelineTask:
        """Plans a tuning job, each of whose trials is a training on the whole cluster."""
        job = self._settings.train
        return self._task(
            "plan_study",
            self._small,
            worker_pool_specs=job.cluster.specs({"image_uri": self._settings.image}),
            job_labels={"component": "tune", "pipeline": self._pipeline, **job.tags},
            **inputs,
        )

    def tuning_job(self, planned: dsl.PipelineTask) -> dsl.PipelineTask:
        """Searches, in a HyperparameterTuningJob that `plan_study` has planned."""
        fields = {name: output for name, output in planned.outputs.items() if name != "trials"}
        return tuning_job(self._pipeline, self._settings.train)(**fields)

    def best_trial(self, searched: dsl.PipelineTask) -> dsl.PipelineTask:
        """Finds the best trial of a tuning job."""
        return self._task("best_trial", self._small, gcp_resources=searched.outputs["gcp_resources"])

    def _task(self, name: str, machine: TaskMachine, **inputs: Any) -> dsl.PipelineTask:
        """Adds a task of a component, on the machine of a table of the settings."""
        component = getattr(self._components, name)
        if "job_name" in component.component_spec.inputs:  # not every backend fills in a component's default
            inputs |= _JOB_NAME
        if not machine.machine_type:
            return machine.apply(component(**inputs))
        return machine.schedule(custom_job(component, machine.job(self._settings.train))(**inputs))
