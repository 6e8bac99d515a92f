"""Nested structures of tensors in words."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def describe_structure(structure: Any) -> str:
    """Returns a nested structure of tensors, or of their specifications, as "(uint8 (9, 9, 3), int64 ())"."""

    def words(item: Any) -> str:
        return f"{item.dtype.name} {tuple(item.shape)}" if hasattr(item, "dtype") else type(item).__name__

    return str(tf.nest.map_structure(words, structure)).replace("'", "")
