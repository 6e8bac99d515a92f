"""Text files: a folder per class, or a table that says what each is labelled with; local or at a URL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardline.components.preprocess.far import brought
from shardline.components.preprocess.sources import BadExample, Example, Span
from shardline.components.preprocess.sources.columns import NOTHING_SAID, Types
from shardline.components.preprocess.sources.images import open_images
from shardline.components.preprocess.sources.labelled import open_labelled
from shardline.trainer.data.features import CLASS, LABEL, Feature, Label

#: Bytes of the largest text: a novel has about as many, and every example is in memory many times.
LARGEST_BYTES = 1 << 20


class Texts:
    """Text files of a directory, in UTF-8; the key is the path.

    Args:
        directory: Files in a folder per class, as `images.open_images` finds them.
        table: A table that lists them instead, as `labelled.open_labelled` reads it; "" for none.
        label: What is to be predicted, in columns of that table.
        said: Types of its columns, as `columns.Columns` takes them.

    Raises:
        SourceError: The directory or the table cannot be used.
    """

    features = (Feature("text", "string"),)

    def __init__(self, directory: str, table: str, label: str, said: Types = NOTHING_SAID) -> None:
        self._files = open_labelled(directory, table, label, said=said) if table else open_images(directory)

    @property
    def labels(self) -> Sequence[Label]:
        """What is to be predicted."""
        declared: Sequence[Label] = getattr(self._files, "labels", ())
        return declared or (Label(LABEL, CLASS, tuple(self._files.class_names)),)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Example | BadExample]:
        for example in brought(self._files):
            yield example if isinstance(example, BadExample) else _read(example)


def _read(example: Example) -> Example | BadExample:
    """Returns an example of a text in the place of one of its file."""
    data = example.image
    try:
        if isinstance(data, Span):
            with open(data.file, "rb") as file:
                data = file.read(LARGEST_BYTES + 1)
        assert isinstance(data, bytes)
        if len(data) > LARGEST_BYTES:
            return BadExample(example.key, "has more than 1 MiB")
        text = data.decode("utf-8-sig")
    except OSError as error:
        return BadExample(example.key, f"cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        return BadExample(example.key, "is no text in UTF-8")
    if not text.strip():
        return BadExample(example.key, "is empty")
    return example._replace(image=None, features={"text": text})
