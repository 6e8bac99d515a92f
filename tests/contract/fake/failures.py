"""Failures that a test asks for, worded as the platform words them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from google.rpc import code_pb2, error_details_pb2

from tests.contract.fake.api import PROJECT, PROJECT_NUMBER, ApiError

#: When a connection is lost: while the client sends its request (nothing is done), or while it receives the
#: answer (all is done).
Drop = Literal["", "request", "answer"]

_WORDS = {
    code_pb2.NOT_FOUND: "Requested entity was not found.",
    code_pb2.ALREADY_EXISTS: "Requested entity already exists.",
    code_pb2.ABORTED: "The operation was aborted, typically due to a concurrency issue.",
    code_pb2.UNAVAILABLE: "The service is currently unavailable.",
    code_pb2.INTERNAL: "Internal error encountered.",
    code_pb2.DEADLINE_EXCEEDED: "Deadline expired before operation could complete.",
}
#: Permissions that a call's name does not give away.
_PERMISSIONS = {
    "UploadModel": "aiplatform.models.upload",
    "PauseSchedule": "aiplatform.schedules.update",
    "ResumeSchedule": "aiplatform.schedules.update",
    "UploadPipeline": "artifactregistry.repositories.uploadArtifacts",
    "DownloadPipeline": "artifactregistry.repositories.downloadArtifacts",
    "AccessSecretVersion": "secretmanager.versions.access",
    "ListLogEntries": "logging.logEntries.list",
}


class DroppedConnection(Exception):  # noqa: N818
    """The door is to drop the connection; `answered` is whether in the middle of the answer."""

    def __init__(self, answered: bool) -> None:
        super().__init__()
        self.answered = answered


@dataclass
class Failure:
    """What happens to the next calls of a method.

    Attributes:
        method: Name of the call.
        code: One of google.rpc.Code; 0 lets the call through (late, or without an answer).
        message: What the error says; what the platform says where it is "".
        times: How many calls still fail.
        delay_s: Seconds for which the call waits first.
        drop: When the connection is lost.
    """

    method: str
    code: int
    message: str
    times: int
    delay_s: float
    drop: Drop

    def error(self) -> ApiError:
        """Returns the answer."""
        if self.code == code_pb2.PERMISSION_DENIED:
            return _denied(self.method, self.message)
        if self.code == code_pb2.RESOURCE_EXHAUSTED:
            return _exhausted(self.method, self.message)
        if self.code == code_pb2.UNAUTHENTICATED:
            return unauthenticated(self.message)
        return ApiError(self.code, self.message or _WORDS.get(self.code, code_pb2.Code.Name(self.code)))


class Failures:
    """The failures that are still to come."""

    def __init__(self) -> None:
        self._waiting: list[Failure] = []
        self._lock = threading.Lock()

    def add(self, failure: Failure) -> None:
        """Lets calls fail; the failures of one method follow each other."""
        self._waiting.append(failure)

    @contextmanager
    def around(self, method: str) -> Iterator[None]:
        """Does to a call what is to happen to it."""
        failure = self._next(method)
        if failure is None:
            yield
            return
        time.sleep(failure.delay_s)
        if failure.drop == "request":
            raise DroppedConnection(answered=False)
        if failure.code:
            raise failure.error()
        yield
        if failure.drop == "answer":
            raise DroppedConnection(answered=True)

    def drops_request(self, method: str) -> bool:
        """Returns whether the next call of a method is lost while the client is sending it."""
        with self._lock:
            waiting = next((item for item in self._waiting if item.method == method), None)
            return waiting is not None and waiting.drop == "request"

    def _next(self, method: str) -> Failure | None:
        with self._lock:
            for failure in self._waiting:
                if failure.method == method:
                    failure.times -= 1
                    if failure.times <= 0:
                        self._waiting.remove(failure)
                    return failure
        return None


def unauthenticated(message: str = "") -> ApiError:
    """Returns the answer to a token that is no longer good."""
    words = (
        "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or "
        "other valid authentication credential. See https://developers.google.com/identity/sign-in."
    )
    details = error_details_pb2.ErrorInfo(reason="ACCESS_TOKEN_EXPIRED", domain="googleapis.com")
    return ApiError(code_pb2.UNAUTHENTICATED, message or words, [details])


def permission_of(method: str) -> str:
    """Returns the permission that a call needs: CreatePipelineJob -> aiplatform.pipelineJobs.create."""
    if method in _PERMISSIONS:
        return _PERMISSIONS[method]
    verb, resource = re.fullmatch(r"([A-Z][a-z]+)(\w+)", method).groups()  # type: ignore[union-attr]
    plural = resource[0].lower() + resource[1:].removesuffix("s") + "s"
    service = "artifactregistry" if plural in ("packages", "versions", "tags") else "aiplatform"
    return f"{service}.{plural}.{verb.lower()}"


def _denied(method: str, message: str) -> ApiError:
    permission = permission_of(method)
    service = f"{permission.partition('.')[0]}.googleapis.com"
    resource = f"projects/{PROJECT}"
    words = f"Permission '{permission}' denied on resource '//{service}/{resource}' (or it may not exist)."
    details = error_details_pb2.ErrorInfo(
        reason="IAM_PERMISSION_DENIED",
        domain=service,
        metadata={"permission": permission, "resource": resource},
    )
    return ApiError(code_pb2.PERMISSION_DENIED, message or words, [] if message else [details])


def _exhausted(method: str, message: str) -> ApiError:
    metric, consumer = "aiplatform.googleapis.com/resource_management_requests", f"projects/{PROJECT_NUMBER}"
    words = (
        f"Quota exceeded for quota metric '{metric}' and limit 'Resource management requests per minute per "
        f"region' of service 'aiplatform.googleapis.com' for consumer 'project_number:{PROJECT_NUMBER}'."
    )
    details = error_details_pb2.ErrorInfo(
        reason="RATE_LIMIT_EXCEEDED",
        domain="googleapis.com",
        metadata={"quota_metric": metric, "consumer": consumer, "service": "aiplatform.googleapis.com"},
    )
    return ApiError(code_pb2.RESOURCE_EXHAUSTED, message or words, [] if message else [details])
