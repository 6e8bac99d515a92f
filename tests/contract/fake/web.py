"""Calls that have no gRPC client here: plain HTTP, one method for each form of address."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.contract.fake.rpcs import path_of


@dataclass(frozen=True)
class WebRoute:
    """One form of address of a call; the groups of the path are named."""

    method: str
    verb: str
    host: re.Pattern[str]
    path: re.Pattern[str]


@dataclass(frozen=True)
class WebRequest:
    """What a client has sent; `fields` is what the path says, and names of headers are lower case."""

    host: str
    fields: Mapping[str, str]
    query: Mapping[str, list[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def route(method: str, verb: str, host: str, path: str) -> WebRoute:
    """Returns a route; {name} in the path is a segment, {name=**} any number of them."""
    return WebRoute(method, verb, re.compile(host), path_of(path))


def matched(routes: tuple[WebRoute, ...], verb: str, host: str, path: str) -> tuple[WebRoute, Any] | None:
    """Returns the route of an address, the path of which is still quoted, and its fields."""
    for found in routes:
        match = found.path.fullmatch(path) if found.verb == verb and found.host.fullmatch(host) else None
        if match:
            return found, {name: unquote(value) for name, value in match.groupdict().items()}
    return None
