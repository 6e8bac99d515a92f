"""Schema of TensorFlow Metadata, the schema.pbtxt of TFX and TFDV, as the Table Schema that says the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardline.trainer.errors import SettingsError

#: A message of protobuf's text format: its values by field, messages or texts as they are written.
_Message = Mapping[str, list[Any]]

_TOKEN = re.compile(r"""\s+|\#[^\n]*|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[\w.+-]+|[{}<>:\[\],;])""")
_TYPES = {"BYTES": "string", "INT": "integer", "FLOAT": "number"}
# Features that are no part of the data yet, or any more.
_UNUSED = {"PLANNED", "ALPHA", "DEBUG_ONLY", "DISABLED", "DEPRECATED"}


def to_table_schema(text: str, where: str) -> dict[str, Any]:
    """Returns the schema as a Table Schema; what that cannot say is left out.

    Raises:
        SettingsError: It is no text of the message Schema.
    """
    try:
        message = _message(_tokens(text), end="")
        domains = {one["name"][0]: one.get("value", []) for one in message.get("string_domain", ())}
        features = [one for one in message["feature"] if one["type"][0] in _TYPES]
        fields = [
            _field(one, domains) for one in features if _UNUSED.isdisjoint(one.get("lifecycle_stage", ()))
        ]
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, StopIteration) as error:
        raise SettingsError(f"{where} is no schema.pbtxt of TensorFlow Metadata: {error!r}") from None
    return {"fields": [field for field in fields if field["name"] != "image"]}


def _tokens(text: str) -> Iterator[str]:
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if not match:
            raise ValueError(text[place : place + 20])
        place = match.end()
        if match[1]:
            yield match[1]


def _message(tokens: Iterator[str], end: str) -> _Message:
    fields: dict[str, list[Any]] = {}
    for name in tokens:
        if name == end:
            return fields
        if name in ",;":
            continue
        token = next(tokens)
        token = next(tokens) if token == ":" else token
        values = fields.setdefault(name, [])
        if token == "[":
            values += [_value(one, tokens) for one in iter(tokens.__next__, "]") if one != ","]
        else:
            values.append(_value(token, tokens))
    if end:
        raise ValueError(f"{end} is missing")
    return fields


def _value(token: str, tokens: Iterator[str]) -> Any:
    if token in "{<":
        return _message(tokens, "}" if token == "{" else ">")
    if token[0] in "\"'":  # with the escapes of C, of the bytes of UTF-8
        return token[1:-1].encode().decode("unicode_escape").encode("latin-1").decode()
    return token


def _field(feature: _Message, domains: Mapping[str, list[str]]) -> dict[str, Any]:
    def numbers(field: str, name: str) -> list[float]:
        found = [float(one[name][0]) for one in feature.get(field, ()) if name in one]
        return [int(one) if one.is_integer() else one for one in found]

    field = {"name": feature["name"][0], "type": _TYPES[feature["type"][0]]}
    constraints: dict[str, Any] = {}
    # What is there may be an empty list, unless the number of values is said.
    (share,) = numbers("presence", "min_fraction") or [0]
    has_value = "shape" in feature or (numbers("value_count", "min") or [0])[0] >= 1
    if has_value and share == 1:
        constraints["required"] = True
    elif has_value and share:
        field["shardline:maxMissing"] = round(1 - share, 9)
    names = [name for one in feature.get("string_domain", ()) for name in one.get("value", ())]
    names = names or [name for one in feature.get("domain", ()) for name in domains[one]]
    if names and field["type"] == "string" and not feature.get("distribution_constraints"):
        constraints["enum"] = names
    for name, word in (("min", "minimum"), ("max", "maximum")):
        if field["type"] != "string" and (
            limit := numbers("int_domain", name) + numbers("float_domain", name)
        ):
            constraints[word] = limit[0]
    return {**field, "constraints": constraints}
