"""The components for pipelines of one's own, in one image: those of which Shardline's own pipelines are made.

`configure` makes objects of flat parameters, which the others take; `shardline.components` has all of them
under their names.
"""

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, fields

from kfp import dsl

from shardline.components.configure.component import configure
from shardline.components.preprocess.component import preprocess
from shardline.components.register.component import register
from shardline.components.rehearse.component import rehearse
from shardline.components.train.component import custom_job, train
from shardline.components.validate.component import export_validate
from shardline.components.vertex.job import CustomJobSettings
from shardline.components.vertex.pools import Cluster, WorkerPool


@dataclass(frozen=True)
class Components:
    """The components in one image, each to be called in a pipeline; `train` is the task of a CustomJob."""

    configure: Callable[..., dsl.PipelineTask]
    preprocess: Callable[..., dsl.PipelineTask]
    rehearse: Callable[..., dsl.PipelineTask]
    train: Callable[..., dsl.PipelineTask]
    export_validate: Callable[..., dsl.PipelineTask]
    register: Callable[..., dsl.PipelineTask]


#: Names of the components.
NAMES = tuple(field.name for field in fields(Components))


def with_image(image: str, job: CustomJobSettings | None = None) -> Components:
    """Returns the components in a container image, as 'shardline image build' makes it of the installed one.

    Args:
        image: Name of the image. A run on this machine needs none.
        job: Machines of the training, and how the platform runs it; one n1-standard-8 unless given.
    """
    component = functools.partial(dsl.component, base_image=image, install_kfp_package=False)
    job = job or CustomJobSettings(cluster=Cluster.of(WorkerPool(machine_type="n1-standard-8")))
    return Components(
        configure=component(configure),
        preprocess=component(preprocess),
        rehearse=component(rehearse),
        train=custom_job(component(train), job),
        export_validate=component(export_validate),
        register=component(register),
    )


@functools.cache
def default() -> Components:
    """Returns the components in the image that is called as settings/local.toml calls it."""
    try:
        version = importlib.metadata.version("shardline")
    except importlib.metadata.PackageNotFoundError:
        return with_image("shardline")
    return with_image(f"shardline:{version}")
