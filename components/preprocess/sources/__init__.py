"""Sources: where labelled examples come from. A source string names one (`open_source`).

A user's own source, named by an import string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from shardline.components.preprocess.sources.source import BadExample, Example, Source, Span
from shardline.trainer import plugins
from shardline.trainer.errors import SettingsError, ShardlineError, SourceError

if TYPE_CHECKING:
    from shardline.components.preprocess.settings import PreprocessSettings

__all__ = ["KNOWN_FORMS", "BadExample", "Example", "Source", "Span", "open_source"]

#: The forms of a source string.
KNOWN_FORMS = (
    "digits",
    "tfds:NAME[:CONFIG]",
    "images:DIR",
    "tfrecord:GLOB",
    "table:PATH",
    "pkg.module:Source",
)


def open_source(settings: PreprocessSettings) -> Source:
    """Returns the source that the settings name.

    Args:
        settings: Of them `source` is "digits" (the 1,797 handwritten digits inside scikit-learn),
            "tfds:NAME[:CONFIG]" (an image classification dataset of TensorFlow Datasets), "images:DIR" (a
            folder per class, or `labels`), "tfrecord:GLOB" (files of tf.train.Example), "table:PATH" (CSV,
            JSONL or Parquet), or "pkg.module:Source" (a class or function without arguments of the user's
            own). `data_dir`, `labels` and `features` say more about some of them.

    Raises:
        SourceError: The source is unknown or cannot be opened.
        SettingsError: `labels` or `features` is given to a source that has no use for it.
    """
    form, _, rest = settings.source.partition(":")
    if settings.labels and form != "images":
        raise SettingsError(f"labels is for images:DIR, the source is {settings.source!r}; leave it out")
    if settings.features and form not in ("tfrecord", "table"):
        raise SettingsError(
            f"features is for tfrecord:GLOB and table:PATH, the source is {settings.source!r}; leave it out"
        )
    if settings.source == "digits":
        from shardline.components.preprocess.sources.digits import Digits

        return Digits()
    if not form or not rest:
        raise SourceError(f"unknown source {settings.source!r}; known: {', '.join(KNOWN_FORMS)}")
    return _open(form, rest, settings)


def _open(form: str, rest: str, settings: PreprocessSettings) -> Source:
    if form == "tfds":
        from shardline.components.preprocess.sources.tfds import Tfds

        return Tfds(rest, data_dir=settings.data_dir)
    if form == "images" and settings.labels:
        from shardline.components.preprocess.sources.images import LabelledImages

        return LabelledImages(rest, settings.labels)
    if form == "images":
        from shardline.components.preprocess.sources.images import open_images

        return open_images(rest)
    if form == "tfrecord":
        from shardline.components.preprocess.sources.tfrecord import TfRecords

        return TfRecords(rest, settings.features)
    if form == "table":
        from shardline.components.preprocess.sources.table import Table

        return Table(rest, settings.features)

    return open_plugin(settings.source, known=KNOWN_FORMS)


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
