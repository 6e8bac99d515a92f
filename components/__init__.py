"""Kubeflow Pipelines components, each a thin body over modules of its folder.

This package has those of our pipelines, for pipelines of your own. They are created on first access:
importing `shardline.components` does not load Kubeflow Pipelines.

    from shardline.components import configure, export_validate, preprocess, register, train

Some have the names of the packages that implement them. `from shardline.components import train` returns the
component; the packages are still imported by their full names, but not with `import ... as`, which reads
attributes.

Its folders may import `shardline.trainer`, KFP and GCPC; they know no schedules and no users.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardline.trainer.base.plugins import installed_version

if TYPE_CHECKING:
    from shardline.components.vertex.job import Cluster, CustomJobSettings, WorkerPool

    configure: Callable[..., Any]
    export_validate: Callable[..., Any]
    preprocess: Callable[..., Any]
    register: Callable[..., Any]
    rehearse: Callable[..., Any]
    train: Callable[..., Any]

__all__ = [
    "Cluster",
    "CustomJobSettings",
    "WorkerPool",
    "configure",
    "export_validate",
    "preprocess",
    "register",
    "rehearse",
    "train",
    "with_image",
]


@dataclass(frozen=True)
class Components:
    """The components in one image, to be called in a pipeline; `train` makes the task of a CustomJob."""

    configure: Callable[..., Any]
    preprocess: Callable[..., Any]
    rehearse: Callable[..., Any]
    train: Callable[..., Any]
    export_validate: Callable[..., Any]
    register: Callable[..., Any]


def with_image(image: str, job: CustomJobSettings | None = None) -> Components:
    """Returns the components in a container image, which 'make image' builds.

    Args:
        image: Name of the image. A run on this machine needs none.
        job: Machines and scheduling of the training; None for one n1-standard-8.
    """
    from kfp import dsl

    from shardline.components.configure.component import configure
    from shardline.components.preprocess.component import preprocess
    from shardline.components.register.component import register
    from shardline.components.rehearse.component import rehearse
    from shardline.components.train.component import custom_job, train
    from shardline.components.validate.component import export_validate
    from shardline.components.vertex.job import Cluster, CustomJobSettings, WorkerPool

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
    """Returns the components in the image that settings/local.toml names."""
    version = installed_version("shardline")
    return with_image(f"shardline:{version}" if version else "shardline")


_NAMES = tuple(field.name for field in fields(Components))


class _Package(ModuleType):
    """The package, whose public names hide the subpackages that the import system sets as attributes."""

    def __getattribute__(self, name: str) -> Any:
        if name in _NAMES:
            return getattr(default(), name)
        if name in ("Cluster", "CustomJobSettings", "WorkerPool"):
            from shardline.components.vertex import job

            return getattr(job, name)
        return super().__getattribute__(name)


sys.modules[__name__].__class__ = _Package
