"""What is different between two states, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardline.components.changes.code import DIGEST
from shardline.components.changes.last_run import State

_SHOWN = 3
_LONGEST = 60


def differences(last: State, now: State) -> list[str]:
    """Returns what has changed between two states, a few words each; nothing if nothing has.

    Settings that one of the two does not have are those of another version of the pipeline: a change too.
    """
    found = [
        *_data(last.data, now.data),
        *_named(last.settings, now.settings),
        *_code(last.code, now.code),
    ]
    more = len(found) - _SHOWN
    return [*found[:_SHOWN], f"{more} more changes"] if more > 1 else found


def _data(last: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    if not now["known_by"]:
        yield f"whether the data has changed is not known: {now['text']}"
    elif now["known_by"] != last["known_by"]:
        before = f"by its {last['known_by']}" if last["known_by"] else "not known"
        yield f"the data is known by its {now['known_by']}, last time it was {before}"
    elif now["digest"] != last["digest"]:
        text = (
            f"{now['text']}, as before"
            if now["text"] == last["text"]
            else f"{now['text']}, was {last['text']}"
        )
        yield f"the data has changed ({text})"


def _named(last: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in [*now, *(name for name in last if name not in now)]:
        if last.get(name) != now.get(name):
            yield f"{name} was {_short(last.get(name))}, is {_short(now.get(name))}"


def _code(last: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in [*now, *(name for name in last if name not in now)]:
        before, after = last.get(name, "missing"), now.get(name, "missing")
        if before != after:
            of_files = DIGEST in before + after
            yield f"the code of {name} has changed" if of_files else f"{name} was {before}, is {after}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
