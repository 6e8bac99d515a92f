"""Class weights: how much the examples of each class count in the loss."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import SettingsError

BALANCED = "balanced"


def class_weights(setting: str, manifest: Manifest) -> tuple[float, ...]:
    """Returns a weight for each class, in the order of the manifest's class names; () for none.

    Args:
        setting: "" for none; "balanced" for records / (classes x examples of the class) in the training
            split, so that each class counts as much as any other; or a JSON object of class names and
            weights, where a class that it leaves out has weight 1.
        manifest: The dataset's.

    Raises:
        SettingsError: When the setting is none of these, names a class that the dataset does not have, or
            gives a weight that is not a number of at least 0.
    """
    if not setting:
        return ()
    if setting == BALANCED:
        return _balanced(manifest.splits["train"].class_counts)
    return _named(_parse(setting), manifest.class_names)


def _balanced(counts: Sequence[int]) -> tuple[float, ...]:
    # The weight of a class without examples weighs nothing, whatever it is.
    return tuple(sum(counts) / (len(counts) * count) if count else 0.0 for count in counts)


def _named(weights: Mapping[str, Any], class_names: Sequence[str]) -> tuple[float, ...]:
    for name, weight in weights.items():
        if name not in class_names:
            near = difflib.get_close_matches(name, class_names, n=8, cutoff=0.0)
            raise SettingsError(f"class_weights: the dataset has no class {name!r}, it has {', '.join(near)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise SettingsError(f"class_weights: {name!r} must be a number of at least 0, got {weight!r}")
    return tuple(float(weights.get(name, 1.0)) for name in class_names)


def _parse(setting: str) -> dict[str, Any]:
    try:
        value = json.loads(setting)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SettingsError(
            f"class_weights takes {BALANCED} or a JSON object of class names and weights such as "
            f'{{"cat": 2.0}}, got {setting!r}'
        )
    return value
