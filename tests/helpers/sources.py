"""Sources as tests open and read them."""

from __future__ import annotations

from typing import Any

from shardline.components.preprocess.plan.survey import check_labels
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.example import BadExample, Example, Source
from tests.helpers.data import payload


def opened(source: str, settings: dict[str, Any] | None = None, **features: str) -> Any:
    """Opens a source; `features` gives names by ours."""
    return open_source(PreprocessSettings(source=source, features=features, **settings or {}))


def read(source: Source) -> list[Example]:
    """Returns all examples in the order of the source; none may be bad."""
    examples = []
    for example in source:
        assert isinstance(example, Example), example
        examples.append(example)
    return examples


def bad(source: Source) -> list[BadExample]:
    """Returns the examples that cannot be used."""
    return [example for example in source if isinstance(example, BadExample)]


def content(source: Source) -> dict[str, tuple[str, Any]]:
    """Returns class and payload of all images by key; none may be bad."""
    names = check_labels(source)[0].class_names
    return {example.key: (names[example.label], payload(example.image)) for example in read(source)}
