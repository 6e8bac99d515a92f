"""Damage to JSON: a true record with one of its nodes replaced by any other value, added, or left out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies

#: Texts that have harmed readers of text.
TEXTS = (
    *("", " ", "\0", "\n", "\x1b[31m", "<script>", '"', "'", "\\", "é", "\u202e", "\ud800", "²"),
    *("NaN", "SIGKILL"),
    *("../../x", "/etc/passwd", "gs://", "a:b:c", "{{$.x}}", "{{$.inputs.parameters['p']}}", "x" * 300),
    *("-1", "1e999", "0x10", "9" * 20, "true", "null", "2026-01-01", "__class__", "*", "<<"),
)

#: Any JSON value, as small as it can be where a test fails.
JSON = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats(allow_nan=False)
    | strategies.text(max_size=8)
    | strategies.sampled_from(TEXTS)
    | strategies.sampled_from([-1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**64), 10**400, -0.0, 1e308]),
    lambda inner: (
        strategies.lists(inner, max_size=3)
        | strategies.dictionaries(strategies.text(max_size=4) | strategies.sampled_from(TEXTS), inner)
    ),
    max_leaves=4,
)


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to each node of a JSON value, that of the whole first."""
    yield prefix
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*prefix, key))


@strategies.composite
def damaged(draw: Any, record: Any) -> Any:
    """Returns a record with one to three of its nodes replaced or removed."""
    for _ in range(draw(strategies.integers(1, 3))):
        record = copy.deepcopy(record)
        path = draw(strategies.sampled_from(list(paths(record))))
        if not path:
            return draw(JSON)
        holder = record
        for key in path[:-1]:
            holder = holder[key]
        if draw(strategies.booleans()):
            holder[path[-1]] = draw(JSON)
        else:
            del holder[path[-1]]
    return record
