"""Shardline: from a dataset and a Keras model to a retraining pipeline for Vertex AI, run locally first.

The names below are the public Python interface. Each is loaded when it is first used: importing `shardline`
loads neither TensorFlow nor Kubeflow Pipelines.

    import shardline

    class Photos:
        class_names = ("cat", "dog")

        def __iter__(self):
            yield shardline.Example(key="1.jpg", label=0, image=Path("1.jpg"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.components.preprocess.run import preprocess as preprocess
    from shardline.components.preprocess.settings import PreprocessSettings as PreprocessSettings
    from shardline.components.preprocess.sources.example import BadExample as BadExample
    from shardline.components.preprocess.sources.example import Example as Example
    from shardline.components.preprocess.sources.example import Source as Source
    from shardline.components.preprocess.sources.example import Span as Span
    from shardline.components.validate import Gate as Gate
    from shardline.components.validate.validation import validate as validate
    from shardline.pipelines.compile import compile_pipeline as compile_pipeline
    from shardline.pipelines.local import launch as launch
    from shardline.pipelines.local import run_pipeline as run_pipeline
    from shardline.trainer.base.errors import ShardlineError as ShardlineError
    from shardline.trainer.base.settings import TrainSettings as TrainSettings
    from shardline.trainer.fit import evaluate as evaluate
    from shardline.trainer.fit import fit as fit
    from shardline.trainer.fit import predict as predict
    from shardline.trainer.loop import strategy as strategy
    from shardline.trainer.manifest import DatasetInfo as DatasetInfo
    from shardline.trainer.manifest import Feature as Feature
    from shardline.trainer.manifest import Label as Label
    from shardline.trainer.manifest import Manifest as Manifest
    from shardline.trainer.models.zoo import encode_columns as encode_columns
    from shardline.trainer.models.zoo import make_output as make_output
    from shardline.trainer.train import train as train

#: Public names by module.
_MODULES = {
    "shardline.components.preprocess.run": ("preprocess",),
    "shardline.components.preprocess.settings": ("PreprocessSettings",),
    "shardline.components.preprocess.sources.example": ("BadExample", "Example", "Source", "Span"),
    "shardline.components.validate": ("Gate",),
    "shardline.components.validate.validation": ("validate",),
    "shardline.pipelines.compile": ("compile_pipeline",),
    "shardline.pipelines.local": ("launch", "run_pipeline"),
    "shardline.trainer.base.errors": ("ShardlineError",),
    "shardline.trainer.base.settings": ("TrainSettings",),
    "shardline.trainer.manifest": ("DatasetInfo", "Feature", "Label", "Manifest"),
    "shardline.trainer.fit": ("evaluate", "fit", "predict"),
    "shardline.trainer.loop": ("strategy",),
    "shardline.trainer.models.zoo": ("encode_columns", "make_output"),
    "shardline.trainer.train": ("train",),
}

__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'shardline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
