"""What all services of the fake have in common: the project, errors, times, pages."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import empty_pb2
from google.rpc import code_pb2

PROJECT_NUMBER = "123456"
PROJECT = "acme-vision"
LOCATION = "europe-west4"

_PARENT = re.compile(r"projects/([^/]+)/locations/([a-z]+-[a-z]+\d)")


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        code: One of google.rpc.Code.
        details: Messages of google.rpc.error_details_pb2 that come with it.
    """

    def __init__(self, code: int, message: str, details: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.details = tuple(details)


@dataclass
class Outcome:
    """How a job ended: `code` is one of google.rpc.Code, 0 for success."""

    code: int = 0
    message: str = ""


def refuse(*faults: str) -> None:
    """Answers INVALID_ARGUMENT when there are faults."""
    if faults:
        raise ApiError(code_pb2.INVALID_ARGUMENT, "; ".join(faults))


def location(parent: str) -> str:
    """Returns a location's name with the project's number, as the API writes it."""
    found = _PARENT.fullmatch(parent)
    if found is None or found.group(1) not in (PROJECT, PROJECT_NUMBER):
        raise ApiError(code_pb2.INVALID_ARGUMENT, f"parent: no such location {parent!r}")
    return f"projects/{PROJECT_NUMBER}/locations/{found.group(2)}"


def numbered(name: str) -> str:
    """Returns a resource's name with the project's number in it, as the API keeps it."""
    return name.replace(f"projects/{PROJECT}/", f"projects/{PROJECT_NUMBER}/")


def find(resources: dict[str, Any], name: str) -> Any:
    """Returns a resource by either form of its name, or answers NOT_FOUND as the API words it."""
    found = resources.get(numbered(name))
    if found is None:
        kind = name.split("/")[-2] if "/" in name else "resource"
        singular = kind[:1].upper() + kind[1:].removesuffix("s")
        raise ApiError(code_pb2.NOT_FOUND, f"The {singular} does not exist. name: {name!r}")
    return found


def now() -> datetime.datetime:
    """Returns the time, as resources carry it."""
    return datetime.datetime.now(datetime.UTC)


def page(items: Sequence[Any], request: Any, size: int = 100) -> tuple[list[Any], str]:
    """Returns the items of the page that a request asks for, and the token of the next."""
    start = int(request.page_token or 0)
    end = start + (request.page_size or size)
    return list(items[start:end]), str(end) if end < len(items) else ""


def done(name: str, response: Any = None) -> operations_pb2.Operation:
    """Returns an operation that is done: clients look at one that is not after many seconds."""
    operation = operations_pb2.Operation(name=name, done=True)
    operation.response.Pack(empty_pb2.Empty() if response is None else response)
    return operation
