"""A user's own source, named by an import string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from shardline.components.preprocess.sources.source import Source
from shardline.trainer import plugins
from shardline.trainer.errors import ShardlineError, SourceError


def open_plugin(reference: str, *, known: Sequence[str]) -> Source:
    """Returns the source that a class or function without arguments gives.

    Args:
        reference: The import string.
        known: The known forms of a source string, named when the module does not exist.

    Raises:
        SourceError: There is no such object, it cannot be called without arguments, or it gives
            something that is not a source.
    """
    make = plugins.load(reference, "source", SourceError, known=known)
    if not callable(make):
        raise SourceError(f"source {reference!r} is a {type(make).__name__}, not a class or function")
    try:
        source = make()
    except ShardlineError:
        raise
    except Exception as failure:
        raise SourceError(f"source {reference!r} cannot be made: {plugins.describe(failure)}") from failure
    for member in ("class_names", "__iter__"):
        if not hasattr(source, member):
            raise SourceError(
                f"source {reference!r} gives a {type(source).__name__} without {member}; a source has "
                "class_names and yields Examples when iterated"
            )
    return cast(Source, source)
