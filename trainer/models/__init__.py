"""Model functions by name; each returns a compiled keras.Model of uint8 images or of a table's columns."""

from __future__ import annotations

import difflib

from shardline.trainer.errors import ModelError

#: Built-in model functions by name, as import strings.
BUILT_IN = {
    "mnist_cnn": "shardline.trainer.models.zoo:build_mnist_cnn",
    "resnet50": "shardline.trainer.models.zoo:build_resnet50",
    "mlp": "shardline.trainer.models.mlp:build_model",
    "text": "shardline.trainer.models.mlp:build_text",
}

#: Before the name of a model of keras.applications.
KERAS_PREFIX = "keras:"
_APPLICATION = "shardline.trainer.models.zoo:build_application"


def import_string(model: str) -> str:
    """Returns the import string of a built-in name, keras:NAME, or `pkg.module:function`; loads nothing."""
    reference = _APPLICATION if model.startswith(KERAS_PREFIX) else BUILT_IN.get(model, model)
    module, _, name = reference.partition(":")
    if not module or not name:
        near = difflib.get_close_matches(model, BUILT_IN, n=1)
        raise ModelError(
            f"unknown model {model!r}; built in are {', '.join(BUILT_IN)} and {KERAS_PREFIX}NAME, your own "
            f"is pkg.module:function{f'; did you mean {near[0]}?' if near else ''}"
        )
    return reference
