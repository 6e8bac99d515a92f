"""Adapted layers: what a model function has taken from the training split, which no optimizer changes.

Vocabularies are no weights: of two runs whose weights agree in their shapes a word may have another number.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import keras

from shardline.trainer.errors import ModelError
from shardline.trainer.keras_internals import all_layers


def identity(model: keras.Model, *, numbers: bool = False) -> dict[str, str]:
    """Returns what a run that goes on must have found in its data again; nothing without such layers.

    Means and variances are weights, which a checkpoint gives back: they are in it where `numbers` says so.
    """
    facts: list[Any] = [_vocabulary(layer) for layer in _lookups(model)]
    facts += [list(layer.bin_boundaries) for layer in _layers(model, keras.layers.Discretization)]
    if numbers:
        normalizations = _layers(model, keras.layers.Normalization)
        facts += [[keras.ops.convert_to_numpy(one).tolist() for one in n.weights] for n in normalizations]
    if not facts:
        return {}
    text = json.dumps(facts, default=str)
    return {"adapted layers": "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]}


def copy(source: keras.Model, model: keras.Model, origin: str) -> None:
    """Gives a model the vocabularies of another, whose weights it has, and uses its means and variances.

    Raises ModelError when they are not alike; `origin` names the other.
    """
    theirs, ours = _lookups(source), _lookups(model)
    if [type(layer) for layer in theirs] != [type(layer) for layer in ours]:
        raise ModelError(
            f"{origin} has {len(theirs)} vocabularies and the model {len(ours)}: a column has too many "
            "values for one now, or had before; train without initial_model"
        )
    for one, other in zip(theirs, ours, strict=True):
        if _vocabulary(one) != _vocabulary(other):
            other.set_vocabulary(one.get_vocabulary(include_special_tokens=False))
    refresh(model)


def refresh(model: keras.Model) -> None:
    """Makes layers compute with means and variances that have been given to them as weights."""
    for layer in _layers(model, keras.layers.Normalization):
        layer.finalize_state()


def _lookups(model: keras.Model) -> list[Any]:
    return _layers(model, keras.layers.StringLookup, keras.layers.IntegerLookup)


def _layers(model: keras.Model, *kinds: type) -> list[Any]:
    return [layer for layer in all_layers(model) if isinstance(layer, kinds)]


def _vocabulary(layer: Any) -> list[str]:
    return [str(word) for word in layer.get_vocabulary()]
