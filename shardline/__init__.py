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
    from shardline.components.preprocess.run import preprocess
    from shardline.components.preprocess.settings import PreprocessSettings
    from shardline.components.preprocess.sources.example import BadExample, Example, Source, Span
    from shardline.components.validate.gate.gate import Gate
    from shardline.components.validate.validation import validate
    from shardline.pipelines.compile import compile_pipeline
    from shardline.pipelines.local.launch import launch
    from shardline.pipelines.local.run import run_pipeline
    from shardline.trainer.base.errors import ShardlineError
    from shardline.trainer.base.settings import TrainSettings
    from shardline.trainer.data.features import Feature, Label
    from shardline.trainer.data.manifest import DatasetInfo, Manifest
    from shardline.trainer.fit import fit
    from shardline.trainer.loop.process import strategy
    from shardline.trainer.models.mlp import encode_columns
    from shardline.trainer.models.zoo import QuantileLoss, make_output
    from shardline.trainer.predict import evaluate, predict
    from shardline.trainer.train import train

#: Module of each public name.
_MODULES = {
    "BadExample": "shardline.components.preprocess.sources.example",
    "DatasetInfo": "shardline.trainer.data.manifest",
    "Example": "shardline.components.preprocess.sources.example",
    "Feature": "shardline.trainer.data.features",
    "Gate": "shardline.components.validate.gate.gate",
    "Label": "shardline.trainer.data.features",
    "Manifest": "shardline.trainer.data.manifest",
    "PreprocessSettings": "shardline.components.preprocess.settings",
    "QuantileLoss": "shardline.trainer.models.zoo",
    "ShardlineError": "shardline.trainer.base.errors",
    "Source": "shardline.components.preprocess.sources.example",
    "Span": "shardline.components.preprocess.sources.example",
    "TrainSettings": "shardline.trainer.base.settings",
    "compile_pipeline": "shardline.pipelines.compile",
    "encode_columns": "shardline.trainer.models.mlp",
    "evaluate": "shardline.trainer.predict",
    "fit": "shardline.trainer.fit",
    "launch": "shardline.pipelines.local.launch",
    "make_output": "shardline.trainer.models.zoo",
    "predict": "shardline.trainer.predict",
    "preprocess": "shardline.components.preprocess.run",
    "run_pipeline": "shardline.pipelines.local.run",
    "strategy": "shardline.trainer.loop.process",
    "train": "shardline.trainer.train",
    "validate": "shardline.components.validate.validation",
}

__all__ = [
    "BadExample",
    "DatasetInfo",
    "Example",
    "Feature",
    "Gate",
    "Label",
    "Manifest",
    "PreprocessSettings",
    "QuantileLoss",
    "ShardlineError",
    "Source",
    "Span",
    "TrainSettings",
    "compile_pipeline",
    "encode_columns",
    "evaluate",
    "fit",
    "launch",
    "make_output",
    "predict",
    "preprocess",
    "run_pipeline",
    "strategy",
    "train",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shardline' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
