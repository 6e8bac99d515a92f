"""Kubeflow Pipelines components, each a thin body over modules of its folder.

This package has those of our pipelines, for pipelines of your own. They are created on first access:
importing `shardline.components` does not load Kubeflow Pipelines.

    from shardline.components import export_validate, preprocess, register, train

Some have the names of the packages that implement them. `from shardline.components import train` returns the
component; the packages are still imported by their full names, but not with `import ... as`, which reads
attributes.

Its folders may import `shardline.trainer`, KFP and GCPC; they know no schedules and no users.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardline.trainer.base.plugins import installed_version

if TYPE_CHECKING:
    from shardline.components.custom_job import Cluster as Cluster
    from shardline.components.custom_job import CustomJobSettings as CustomJobSettings
    from shardline.components.custom_job import WorkerPool as WorkerPool

    best_trial: Any
    exit_handler: Any
    detect_changes: Any
    export_validate: Any
    finish_dataset: Any
    plan_shards: Any
    plan_study: Any
    preprocess: Any
    record_run: Any
    register: Any
    rehearse: Any
    serving_model: Any
    train: Any
    write_shards: Any

#: The components, by the folders of their functions.
_COMPONENTS = {
    "changes": ("detect_changes", "record_run"),
    "preprocess": ("preprocess", "plan_shards", "write_shards", "finish_dataset"),
    "rehearse": ("rehearse",),
    "train": ("train",),
    "tune": ("plan_study", "best_trial"),
    "validate": ("export_validate",),
    "register": ("register", "serving_model"),
    "exit_handler": ("exit_handler",),
}
_FOLDERS = {name: folder for folder, names in _COMPONENTS.items() for name in names}
_MACHINES = ("Cluster", "CustomJobSettings", "WorkerPool")

__all__ = [*_FOLDERS, *_MACHINES, "with_image"]


class Components:
    """The components in a container image, as attributes; each is a component of KFP, made when it is used.

    With a `job`, `train` is a function that makes the task of a CustomJob, which runs it on every replica.
    """

    def __init__(self, image: str, job: CustomJobSettings | None = None, code: str = "") -> None:
        self._image, self._job, self._code = image, job, code

    def __getattr__(self, name: str) -> Any:
        if name not in _FOLDERS:
            raise AttributeError(f"there is no component {name!r}; there are {', '.join(_FOLDERS)}")
        from kfp import dsl

        from shardline.components.code import with_code

        module = importlib.import_module(f"shardline.components.{_FOLDERS[name]}.component")
        # The image has KFP: its tasks install nothing.
        component = dsl.component(getattr(module, name), base_image=self._image, install_kfp_package=False)
        component = with_code(component, self._code)
        if name == "train" and self._job:
            component = module.custom_job(component, self._job)
        setattr(self, name, component)
        return component


def with_image(image: str, job: CustomJobSettings | None = None, packages: Iterable[str] = ()) -> Components:
    """Returns the components in a container image, which 'make image' builds.

    Args:
        image: Name of the image. A run on this machine needs none.
        job: Machines and scheduling of the training; None trains in the task itself, on one machine.
        packages: Packages of yours, or modules beside a notebook, that the components bring with them.
    """
    from shardline.components.code import pack

    return Components(image, job, pack([*packages]))


@functools.cache
def default() -> Components:
    """Returns the components in the image that settings/local.toml names."""
    version = installed_version("shardline")
    return with_image(f"shardline:{version}" if version else "shardline")


class _Package(ModuleType):
    """The package, whose public names hide the subpackages that the import system sets as attributes."""

    def __getattribute__(self, name: str) -> Any:
        if name in _FOLDERS:
            return getattr(default(), name)
        if name in _MACHINES:
            from shardline.components import custom_job

            return getattr(custom_job, name)
        return super().__getattribute__(name)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *__all__]


sys.modules[__name__].__class__ = _Package
