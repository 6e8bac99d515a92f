"""Plug-ins of a run: the import strings among its parameters, for whoever looks for their code."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from shardline.components.preprocess.sources import KNOWN_FORMS
from shardline.trainer.settings import plugins_of as of_training

_BUILT_IN_SOURCES = tuple(form.partition(":")[0] for form in KNOWN_FORMS[:-1])


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
    if isinstance(source, str) and ":" in source and source.partition(":")[0] not in _BUILT_IN_SOURCES:
        found["source"] = source
    return found
