"""Sources: where labelled images come from. A source string names one (`open_source`)."""

from __future__ import annotations

from components.preprocess.sources.source import Example, Source
from trainer.errors import SourceError

__all__ = ["KNOWN_FORMS", "Example", "Source", "open_source"]

#: The forms of a source string.
KNOWN_FORMS = ("digits", "tfds:NAME[:CONFIG]", "images:DIR", "pkg.module:Source")


def open_source(source: str, *, data_dir: str = "") -> Source:
    """Returns the source that a source string names.

    Args:
        source: "digits" (the 1,797 handwritten digits inside scikit-learn), "tfds:NAME[:CONFIG]" (an image
            classification dataset of TensorFlow Datasets), "images:DIR" (a folder per class), or
            "pkg.module:Source" (a class or function without arguments of the user's own).
        data_dir: Directory with prepared TensorFlow Datasets; "" for their default directory.

    Raises:
        SourceError: The source is unknown or cannot be opened.
    """
    form, _, rest = source.partition(":")
    if source == "digits":
        from components.preprocess.sources.digits import Digits

        return Digits()
    if form == "tfds" and rest:
        from components.preprocess.sources.tfds import Tfds

        return Tfds(rest, data_dir=data_dir)
    if form == "images" and rest:
        from components.preprocess.sources.images import Images

        return Images(rest)
    if form and rest:
        from components.preprocess.sources.plugin import open_plugin

        return open_plugin(source, known=KNOWN_FORMS)
    raise SourceError(f"unknown source {source!r}; known: {', '.join(KNOWN_FORMS)}")
