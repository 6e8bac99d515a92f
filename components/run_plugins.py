"""Plug-ins of a run: those of its training (`trainer.settings.plugins_of`) and its source, by parameter."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from shardline.components.preprocess.sources import is_plugin
from shardline.trainer.settings import plugins_of as of_training


def plugins_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns the import strings among the parameters of a run, by the parameter that names each."""
    options = parameters.get("train_options")
    if isinstance(options, str):  # as a command line gives it
        with contextlib.suppress(ValueError):
            options = json.loads(options)
    options = options if isinstance(options, Mapping) else {}
    training = of_training({**options, "model": parameters.get("model")})
    found = {name if name == "model" else f"train_options.{name}": value for name, value in training.items()}
    source = parameters.get("source")
    if isinstance(source, str) and is_plugin(source):
        found["source"] = source
    return found
