"""The calls of a service, as its client itself makes them: paths, messages and REST routes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

_TEMPLATE = re.compile(r"\{([\w.]+)(?:=([^}]+))?\}")


@dataclass(frozen=True)
class Route:
    """One REST form of a call.

    The groups of the path are fields of the request, "__" for "."; `body` is the field that is the body, "*"
    for the whole request, "" for none.
    """

    verb: str
    path: re.Pattern[str]
    body: str


@dataclass(frozen=True)
class Rpc:
    """One call of a service, /package.Service/Method, with its types of messages (proto-plus)."""

    path: str
    request: Any
    response: Any
    routes: tuple[Route, ...]

    @property
    def method(self) -> str:
        """The call's own name: CreateCustomJob."""
        return self.path.rpartition("/")[2]


def rpcs_of(grpc_transport: Any, rest_base: Any) -> dict[str, Rpc]:
    """Returns a client's calls by path, from its gRPC transport class and its module of REST routes."""
    channel = _Channel()
    transport = grpc_transport(channel=channel)
    # Its interceptor would make the stubs only when they are called.
    transport._logged_channel, transport._stubs = channel, {}
    transport._prep_wrapped_messages(None)
    routes = dict(_routes(rest_base))
    found = {}
    for path, (request, response) in channel.stubs.items():
        method = path.rpartition("/")[2]
        # Plain protobuf messages (google.longrunning and its like) have no such owner; nobody needs them.
        if isinstance(request, type) and isinstance(response, type):
            found[path] = Rpc(path, request, response, routes.get(method, ()))
    return found


class _Channel(grpc.Channel):
    """Notes the stubs that a transport makes, and reaches nobody."""

    def __init__(self) -> None:
        self.stubs: dict[str, tuple[Any, ...]] = {}

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        *_: Any,
        **__: Any,
    ) -> Callable[..., Any]:
        owners = (getattr(item, "__self__", None) for item in (request_serializer, response_deserializer))
        self.stubs[method] = tuple(owners)
        return lambda *_, **__: None

    unary_stream = stream_unary = stream_stream = unary_unary

    def subscribe(self, *_: Any, **__: Any) -> None:
        pass

    unsubscribe = subscribe

    def close(self) -> None:
        pass

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _routes(rest_base: Any) -> Iterator[tuple[str, tuple[Route, ...]]]:
    for holder in vars(rest_base).values():
        if not isinstance(holder, type):
            continue
        for name, call in vars(holder).items():
            if name.startswith("_Base") and hasattr(call, "_get_http_options"):
                yield name.removeprefix("_Base"), tuple(map(_route, call._get_http_options()))


def _route(option: Mapping[str, str]) -> Route:
    return Route(option["method"].upper(), path_of(option["uri"]), option.get("body", ""))


def path_of(template: str) -> re.Pattern[str]:
    """Returns what matches the paths of a template: /v1/{name=projects/*}/jobs/{job}."""
    pattern, end = "", 0
    for match in _TEMPLATE.finditer(template):
        wanted = re.escape(match.group(2) or "*").replace(r"\*\*", ".+").replace(r"\*", "[^/]+")
        group = match.group(1).replace(".", "__")
        pattern += re.escape(template[end : match.start()]) + f"(?P<{group}>{wanted})"
        end = match.end()
    return re.compile(pattern + re.escape(template[end:]))
