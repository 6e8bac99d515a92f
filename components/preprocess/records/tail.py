"""The entries of a tf.train.Example that follow the image: key, label and further features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from shardline.components.preprocess.records.example import serialize
from shardline.trainer.data.manifest import Feature, Scalar
from shardline.trainer.errors import BadRecordError, SourceError

_OWN = frozenset({"image", "label", "key"})
_TYPES: Mapping[str, type | tuple[type, ...]] = {"int64": int, "float32": (float, int), "string": str}


def entries(features: Mapping[str, bytes | int | float | str]) -> bytes:
    """Returns features as they stand inside a tf.train.Example, without its first tag and length."""
    data = serialize(features)
    start = 1
    while data[start] > 0x7F:
        start += 1
    return data[start + 1 :]


@lru_cache(1024)
def key_head(length: int) -> bytes:
    """Returns what stands in an Example before a key of `length` bytes."""
    return entries({"key": bytes(length)})[:-length]


class FeatureEntries:
    """Checks and serializes the further features of examples.

    Args:
        declared: What every example has, beside image, label and key.

    Raises:
        SourceError: A declaration cannot be used.
    """

    def __init__(self, declared: Sequence[Feature]) -> None:
        for feature in declared:
            if feature.name in _OWN or feature.dtype not in _TYPES or feature.shape:
                raise SourceError(
                    f"the source declares a feature {feature.name!r} of {feature.dtype} {feature.shape}; "
                    f"expected a scalar of {', '.join(_TYPES)}, "
                    f"and a name other than {', '.join(sorted(_OWN))}"
                )
        self._types = {feature.name: (feature.dtype, _TYPES[feature.dtype]) for feature in declared}

    def of(self, features: Mapping[str, Scalar], name: str) -> bytes:
        """Returns the entries of one example.

        Raises:
            BadRecordError: The values are not those that were declared.
        """
        if features.keys() != self._types.keys():
            raise BadRecordError(
                name, f"has the features {sorted(features)}, the source declares {sorted(self._types)}"
            )
        values = {}
        for feature, (dtype, types) in self._types.items():
            value = features[feature]
            if not isinstance(value, types) or isinstance(value, bool):
                raise BadRecordError(name, f"feature {feature!r} is {value!r}, not {dtype}")
            values[feature] = float(value) if dtype == "float32" else value
        return entries(values)
