"""Common steps of both pipelines, and their common parameters."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import docstring_parser
from kfp import dsl

from shardline.components.conclude.component import conclude
from shardline.components.configure.component import OBJECTS, configure, parameters
from shardline.components.preprocess.component import finish_dataset, plan_shards, preprocess, write_shards
from shardline.components.register.component import (
    PROJECT,
    deploy_tasks,
    register,
    serving_model,
    upload_task,
)
from shardline.components.rehearse.component import rehearse
from shardline.components.train.component import custom_job, train
from shardline.components.validate.component import export_validate
from shardline.components.vertex.job import Cluster, CustomJobSettings, TaskMachine, WorkerPool
from shardline.pipelines.settings import Settings

#: Fields of a run's objects that the pipeline sets itself, or has under another name.
_KNOWN = ("readers", "processes")


def make_pipeline(
    name: str,
    description: str,
    function: Callable[..., None],
    settings: Settings,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> Any:
    """Makes a pipeline whose parameters are those of a function, and the fields of data, training and gate.

    Types, defaults and descriptions of the fields are those of their dataclasses, unless the function has a
    parameter of this name. `function` adds the tasks; it takes the settings, the pipeline that trains and
    registers, and as keywords its own parameters and the fields. `defaults` are for its parameters.
    """
    own = [
        parameter.replace(
            kind=inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=(defaults or {}).get(parameter.name, parameter.default),
        )
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    explained_here = {item.arg_name for item in docstring_parser.parse(function.__doc__ or "").params}
    named = {*_KNOWN, *(parameter.name for parameter in own)}
    shared = [parameter for parameter in parameters() if parameter.name not in named]
    explained = {
        item.arg_name: " ".join((item.description or "").split())
        for kind in OBJECTS
        for item in docstring_parser.parse(kind.__doc__ or "").params
        if item.arg_name not in {*_KNOWN, *explained_here}
    }
    names = [parameter.name for parameter in [*own, *shared]]

    train_and_register = train_and_register_pipeline(settings, name)

    def pipeline(*values: Any) -> None:
        function(settings, train_and_register, **dict(zip(names, values, strict=True)))

    pipeline.__name__ = function.__name__
    pipeline.__doc__ = "\n".join(
        [inspect.getdoc(function) or "", *(f"    {key}: {text}" for key, text in explained.items())]
    )
    pipeline.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return dsl.pipeline(name=name, description=description)(pipeline)


def make_component(settings: Settings, function: Callable[..., Any]) -> Any:
    """Returns a component of a function; the image has KFP: its tasks install nothing."""
    return dsl.component(function, base_image=settings.image, install_kfp_package=False)


def on_machine(settings: Settings, machine: TaskMachine) -> Callable[..., Any]:
    """Returns a function that makes a component of a function, whose tasks run on the machine of a table.

    The components take their inputs as keywords, like those of `make_component`.
    """
    make = partial(make_component, settings)
    if not machine.machine_type:
        return lambda function: lambda **inputs: machine.apply(make(function)(**inputs))
    job = _single_replica_job(settings.train, machine)
    return lambda function: lambda **inputs: machine.schedule(custom_job(make(function), job)(**inputs))


def _single_replica_job(job: CustomJobSettings, machine: TaskMachine) -> CustomJobSettings:
    pool = WorkerPool(
        machine_type=machine.machine_type,
        accelerator_type=machine.accelerator_type,
        accelerator_count=machine.accelerator_count,
        boot_disk_size_gb=machine.disk or WorkerPool.boot_disk_size_gb,
    )
    # Not the account: training has its own.
    same = ("restart_job_on_worker_restart", "network", "encryption_spec_key_name", "tags")
    network = ("psc_interface_config", "reserved_ip_ranges")
    return CustomJobSettings(
        **{name: getattr(job, name) for name in same},
        extra={name: job.extra[name] for name in network if name in job.extra},
        cluster=Cluster.of(pool),
        timeout=machine.timeout,
        num_retries=0,
    )


def run_arguments(history_uri: Any) -> dict[str, Any]:
    """Returns the arguments job_name and history_uri of a task."""
    return {"job_name": dsl.PIPELINE_JOB_NAME_PLACEHOLDER, "history_uri": history_uri}


def configure_task(settings: Settings, **inputs: Any) -> dsl.PipelineTask:
    """Adds the first task, `configure` with these inputs, and returns it.

    The number of readers is the settings' number of workers.
    """
    return on_machine(settings, settings.register.uncached())(configure)(
        scheduled=dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER,
        created=dsl.PIPELINE_JOB_CREATE_TIME_UTC_PLACEHOLDER,
        readers=settings.train.cluster.replica_count,
        **inputs,
    )


def preprocess_tasks(settings: Settings, data: Any, processes: Any, fingerprint: Any = None) -> Any:
    """Adds the one task that writes a dataset, or the many of the settings, and returns the dataset.

    It is cached by the fingerprint of its data. Many tasks share a directory that another run may be writing
    to: none of them is cached.
    """
    machine, inputs = settings.preprocess, {"data": data, "processes": processes}
    if machine.tasks == 1 and fingerprint is not None:
        return on_machine(settings, machine)(preprocess)(fingerprint=fingerprint, **inputs).outputs["dataset"]
    component = on_machine(settings, machine.uncached())
    if machine.tasks == 1:
        return component(preprocess)(**inputs).outputs["dataset"]
    planned = component(plan_shards)(tasks=machine.tasks, **inputs)
    directory = planned.outputs["planned"]
    with dsl.ParallelFor(planned.outputs["Output"], name="shards") as part:
        written = component(write_shards)(planned=directory, part=part)
    return component(finish_dataset)(planned=directory).after(written).outputs["dataset"]


def rehearse_task(settings: Settings, **inputs: Any) -> dsl.PipelineTask:
    """Adds the rehearsal of the steps after the dataset, with these inputs, and returns its task."""
    servers = settings.train.cluster.parameter_servers
    return on_machine(settings, settings.validate.uncached())(rehearse)(
        readers=settings.train.cluster.replica_count,
        parameter_servers=servers.replica_count if servers else 0,
        job_directory=settings.train.base_output_directory,
        **inputs,
    )


def exit_task(settings: Settings, history_uri: Any) -> Any:
    """Adds the exit task, which runs at the end of every run."""
    if settings.notify.emails:
        from google_cloud_pipeline_components.v1.vertex_notification_email import VertexNotificationEmailOp

        return VertexNotificationEmailOp(recipients=list(settings.notify.emails))
    component = make_component(settings, conclude)
    component.component_spec.implementation.container.env = settings.tracking.environment
    return component(
        job_resource_name=dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER,
        project=PROJECT,
        notify_when=settings.notify.when,
        webhook_secret=settings.notify.webhook_secret,
        **run_arguments(history_uri),
    ).set_caching_options(False)


def train_and_register_pipeline(settings: Settings, name: str) -> Any:
    """Builds the part of a pipeline from a dataset to the exported model, its output.

    `name` is that of the whole pipeline, for labels.
    """
    train_op = custom_job(make_component(settings, train), settings.train, {"pipeline": name})
    # Compared with the present champion: never cached, nor are later tasks.
    export_validate_op = on_machine(settings, settings.validate.uncached())(export_validate)

    def train_and_register(
        dataset: dsl.Input[dsl.Dataset],
        training: dict,  # type: ignore[type-arg]
        gate: dict,  # type: ignore[type-arg]
        base_output_directory: str,
    ) -> dsl.Model:
        """Trains on a dataset, validates the exported model, and registers it if it is blessed."""
        trained = train_op(dataset=dataset, training=training, base_output_directory=base_output_directory)
        validated = export_validate_op(
            dataset=dataset,
            model=trained.outputs["model"],
            gate=gate,
            job_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
        )
        with dsl.If(validated.outputs["Output"] == True, name="blessed"):  # noqa: E712  # a KFP condition
            _register(settings, validated, gate, name)
        return validated.outputs["exported"]

    return dsl.pipeline(name="train-and-register")(train_and_register)


def _register(settings: Settings, validated: dsl.PipelineTask, gate: Any, pipeline: str) -> None:
    """Adds the tasks of a blessed model: it becomes the champion after upload and deployment."""
    machine = settings.register.uncached()
    component = on_machine(settings, machine)
    arguments = {"exported": validated.outputs["exported"], "gate": gate}
    arguments |= {"job_name": dsl.PIPELINE_JOB_NAME_PLACEHOLDER}
    registered = component(register)(**arguments)
    if upload := settings.model_upload:
        ready = component(serving_model)(
            image_uri=upload.serving_image_uri,
            pipeline=pipeline,
            parent_model=upload.parent_model,
            endpoint=settings.deploy.endpoint if settings.deploy else "",
            **arguments,
        )
        tasks = [upload_task(upload, ready, pipeline)]
        if settings.deploy:
            tasks += deploy_tasks(settings.deploy, tasks[0], upload.display_name, pipeline)
        for task in tasks:
            machine.schedule(task)
        registered.after(tasks[-1])
