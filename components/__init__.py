"""The components ring: Kubeflow Pipelines components, each a thin body over the module beside it.

Those of our own pipelines are here under their names for pipelines of yours. They are made when the first is
asked for: importing `shardline.components` loads no Kubeflow Pipelines.

    from shardline.components import configure, export_validate, preprocess, register, train

Some are called as the packages that implement them. In `from shardline.components import train` these names
win, and the packages are found by their whole names all the same, but for `import ... as`, which Python takes
for attributes of attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.components.library import with_image
    from shardline.components.vertex.job import CustomJobSettings
    from shardline.components.vertex.pools import Cluster, WorkerPool

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


class _Package(ModuleType):
    """The package, whose public names win over the subpackages that the import system sets beside them."""

    def __getattribute__(self, name: str) -> Any:
        if name not in __all__:
            return super().__getattribute__(name)
        from shardline.components import library

        return getattr(library.default() if name in library.NAMES else library, name)


sys.modules[__name__].__class__ = _Package
