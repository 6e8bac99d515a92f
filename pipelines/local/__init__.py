"""Local runs: a compiled pipeline on this machine, its custom jobs as real processes.

It may import the specs and settings of `pipelines`; inside, `process` knows no `job`, and `job` no pipeline.
Each name of it is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.pipelines.local.program import launch as launch
    from shardline.pipelines.local.run import failed_run as failed_run
    from shardline.pipelines.local.run import run_pipeline as run_pipeline
    from shardline.pipelines.local.run import with_checkpoints as with_checkpoints
    from shardline.pipelines.local.terminal import foreground as foreground

_MODULES = {"launch": "program", "foreground": "terminal"}
_MODULES |= dict.fromkeys(("failed_run", "run_pipeline", "with_checkpoints"), "run")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
