"""Client of the platform: Google's own clients for one project and region, one policy of retries, its errors.

Google's libraries are loaded when the first client is used; what they raise becomes one line: what happened,
and what to do.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from shardline.components.text import truncate
from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import PlatformError, SettingsError

if TYPE_CHECKING:
    from google.api_core.retry import Retry
    from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

T = TypeVar("T")
Item = TypeVar("Item")

#: Timeout of one attempt, in seconds.
_TIMEOUT_S = 30.0
#: Retries where the service is not reached: there is no network.
_MAX_UNREACHED_RETRIES = 3
#: Seconds of retries where a service is busy.
_RETRY_S = 60.0
#: Seconds of retries of one read of many, `with_retries`.
READ_RETRY_S = 20.0

_NAME = re.compile(r"projects/(?P<project>[\w:.-]+)/locations/(?P<location>[a-z0-9-]+)/")
#: The smallest role that has a permission, by the permission's beginning.
_ROLES = {
    "aiplatform.": "roles/aiplatform.user",
    "bigquery.jobs.": "roles/bigquery.jobUser",
    "bigquery.readsessions.": "roles/bigquery.readSessionUser",
    "bigquery.": "roles/bigquery.dataViewer",
    "storage.buckets.": "roles/storage.legacyBucketReader",
    "storage.objects.": "roles/storage.objectUser",
    "artifactregistry.": "roles/artifactregistry.writer",
    "iam.serviceAccounts.actAs": "roles/iam.serviceAccountUser",
    "logging.": "roles/logging.viewer",
    "secretmanager.": "roles/secretmanager.secretAccessor",
}

#: The name of a permission in a message.
_PERMISSION = re.compile(r"[Pp]ermission ['\"]?(\w+(?:\.\w+){2,})|['\"](\w+(?:\.\w+){2,})['\"] permission")
_ACT_AS = re.compile(r"act as (?:the )?service[_ ]account")
#: Messages of gRPC, requests and google-auth where no connection was made.
_UNREACHED = re.compile(
    "certificate|proxy|lookup failed|resolution|failed to resolve|connection refused|connect timeout|"
    "failed to connect|failed to establish|metadata from plugin",
    re.IGNORECASE,
)
_SIGN_IN = "run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS to a key file"


def _service(name: str, doc: str) -> cached_property[Any]:
    """Returns a property of `Platform`: Google's client of this class."""

    def client(platform: Platform) -> Any:
        from google.api_core.client_options import ClientOptions
        from google.cloud import aiplatform_v1

        options = ClientOptions(api_endpoint=platform.host)
        with platform_errors("sign in to Google Cloud"):
            return getattr(aiplatform_v1, name)(client_options=options)

    client.__doc__ = doc
    return cached_property(client)


@dataclass(frozen=True)
class Platform:
    """The platform's services in one project (id or number) and region; a client is made when first used."""

    project: str
    location: str

    @classmethod
    def of_resource(cls, name: str, *, project: str = "") -> Self:
        """Returns the project and region of a resource name, projects/P/locations/L/...

        P is often a number; `project` is an id to use instead.
        """
        match = _NAME.match(name)
        if match is None:
            raise PlatformError(f"{name!r} is not a resource name, projects/P/locations/L/...")
        return cls(project or match["project"], match["location"])

    @property
    def parent(self) -> str:
        """Resource name of the location."""
        return f"projects/{self.project}/locations/{self.location}"

    @property
    def host(self) -> str:
        """Host of the Vertex AI API; it receives a token, so SettingsError where the location is no name."""
        if not re.fullmatch(r"[a-z0-9-]+", self.location):
            raise SettingsError(f"location must be a region such as europe-west4, got {self.location!r}")
        return f"{self.location}-aiplatform.googleapis.com"

    pipelines = _service("PipelineServiceClient", "Runs of pipelines.")
    schedules = _service("ScheduleServiceClient", "Schedules.")
    models = _service("ModelServiceClient", "The Model Registry.")
    endpoints = _service("EndpointServiceClient", "Endpoints of deployed models.")
    jobs = _service("JobServiceClient", "Custom jobs and hyperparameter tuning jobs.")

    @cached_property
    def logs(self) -> LoggingServiceV2Client:
        """Cloud Logging."""
        from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client

        with platform_errors("sign in to Google Cloud"):
            return LoggingServiceV2Client()


def call_api(
    action: str,
    method: Callable[..., T],
    request: Any,
    *,
    repeatable: bool = True,
    outage_s: float = 0.0,
    read_existing: Callable[[], T] | None = None,
) -> T:
    """Calls the platform, with retries where it is busy or the connection is lost.

    Args:
        action: What the call does, for messages: "submit the pipeline".
        method: Method of a client: `platform.pipelines.get_pipeline_job`.
        request: Its request, a message or a dictionary.
        repeatable: Whether the call is retried when it may have been executed. Otherwise it is retried only
            where the platform has done nothing (429, or 401 with an old token).
        outage_s: Seconds of retries, for one that nobody waits for; 0 for the default of `retry_policy`.
        read_existing: For a call that creates something under our own id: reads what an earlier attempt has
            created whose response was lost.

    Raises:
        PlatformError: When the platform refuses, fails or is not reached.
    """
    from google.api_core.exceptions import AlreadyExists
    from google.api_core.timeout import ConstantTimeout

    transport = getattr(getattr(method, "__self__", None), "transport", None)
    failed: list[Exception] = []
    credentials = getattr(transport, "_credentials", None)
    retry = retry_policy(action, credentials, failed=failed, repeatable=repeatable, outage_s=outage_s)
    timeout = ConstantTimeout(_TIMEOUT_S)  # type: ignore[no-untyped-call]
    with platform_errors(action):
        try:
            return method(request=request, retry=retry, timeout=timeout)
        except AlreadyExists:
            if read_existing is None or not failed:
                raise
        return read_existing()


def retry_policy(
    action: str,
    credentials: Any = None,
    *,
    failed: list[Exception] | None = None,
    repeatable: bool = True,
    outage_s: float = 0.0,
) -> Retry:
    """Returns the retry policy of one call, also for Google's other clients.

    A refused token of `credentials` is renewed once. `failed` collects the errors of failed attempts. Retries
    last `outage_s` seconds, also where the service is not reached; 0 for a minute, and then only seconds.
    """
    from google.api_core.retry import Retry

    failed = [] if failed is None else failed
    transient = {RefusalKind.BUSY, *((RefusalKind.LOST, RefusalKind.UNREACHED) if repeatable else ())}
    begin = time.monotonic()

    def should_retry(error: Exception) -> bool:
        kind = refusal_kind(error)
        expired = any(refusal_kind(each) is RefusalKind.EXPIRED for each in failed)
        if kind is RefusalKind.EXPIRED and credentials is not None and not expired:
            credentials.token = None  # gRPC renews it by the clock only, and not when the platform refuses it
            return True
        if kind is RefusalKind.UNREACHED and not outage_s:
            return repeatable and len(failed) < _MAX_UNREACHED_RETRIES
        return kind in transient and time.monotonic() - begin < (outage_s or _RETRY_S)

    def record(error: Exception) -> None:
        failed.append(error)
        # Retries of a service that is not reached end within seconds: no line.
        if outage_s or refusal_kind(error) is not RefusalKind.UNREACHED:
            progress.report("vertex", f"cannot {action} yet ({short_reason(error)}); trying again")

    return Retry(
        predicate=should_retry,
        initial=0.5,
        maximum=60.0 if outage_s else 8.0,
        timeout=None,  # raises the last error, not a RetryError
        on_error=record,
    )


def with_retries(request: Callable[[Item], T], item: Item) -> T:
    """Returns the result of one read of many, retried after transient errors with growing pauses."""
    from google.api_core.exceptions import RetryError
    from google.api_core.retry import Retry

    try:
        return Retry(is_transient, initial=0.5, maximum=8.0, timeout=READ_RETRY_S)(request)(item)
    except RetryError as over:
        raise over.cause from over.cause.__cause__


def is_transient(error: BaseException) -> bool:
    """Returns whether the same request may succeed a moment later."""
    if "certificate verify failed" in str(error).lower():
        return False
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    # Renewing a token raises an error of its own, caused by that of the connection.
    cause = error.__cause__ if type(error).__module__.startswith("google.auth") else None
    return refusal_kind(error) in (RefusalKind.BUSY, RefusalKind.LOST, RefusalKind.UNREACHED) or (
        cause is not None and is_transient(cause)
    )


def read_secret(name: str) -> str:
    """Returns the text of a secret in Secret Manager, without space around it; no error shows it.

    `name` is a `custom_job.SECRET`. Raises PlatformError when Secret Manager refuses, or is not reached.
    """
    from google.cloud.secretmanager import SecretManagerServiceClient

    with platform_errors("sign in to Google Cloud"):
        client = SecretManagerServiceClient()
    answer = call_api(f"read the secret {name}", client.access_secret_version, {"name": name})
    return str(answer.payload.data.decode()).strip()


def list_all(
    action: str, method: Callable[..., Iterable[T]], request: Any, *, limit: int | None = None
) -> list[T]:
    """Calls a list method, page by page, as `call_api` does; at most `limit` items, None for all."""
    with platform_errors(action):  # later pages are requested while they are read
        return list(islice(call_api(action, method, request), limit))


@contextlib.contextmanager
def platform_errors(action: str) -> Iterator[None]:
    """Turns errors of Google's clients into a PlatformError of one line: "cannot {action}: ..." and why."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    try:
        yield
    except (GoogleAPIError, GoogleAuthError, RequestException) as error:
        raise platform_error(action, error) from error
    except Exception:
        # google-auth raises any error where a file holds no credentials.
        if path := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            try:
                files.read_json(Path(path), PlatformError)
            except PlatformError as damaged:
                what = f"cannot sign in to Google Cloud: GOOGLE_APPLICATION_CREDENTIALS: {damaged}"
                raise PlatformError(what) from None
        raise


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Returns what a call returns, or raises what it raises.

    Raises TimeoutError after `seconds`, when the call goes on in a thread that does not outlive the process.
    A library's own timeout is for each read, of which a slow answer has many.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="deadline", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"timed out: no whole answer within {seconds:g} s") from None


class RefusalKind(enum.Enum):
    """Kind of a failed call, by which it is retried or not."""

    BUSY = "too many requests, nothing was done (429)"
    EXPIRED = "the token was refused (401)"
    MISSING = "not found (404)"
    CONFLICT = "it exists already, or was changed meanwhile (409, 412)"
    UNREACHED = "no connection to the service"
    LOST = "may have been executed: 5xx, timeout, connection lost"
    REFUSED = "refused; a retry cannot help"


def refusal_kind(error: BaseException | None) -> RefusalKind:
    """Returns the kind of a failed call."""
    from google.api_core import exceptions as api
    from google.auth.exceptions import TransportError
    from requests import exceptions as web
    from urllib3.exceptions import HTTPError

    error = _cause(error)
    lost = (
        *(api.InternalServerError, api.Unknown, api.BadGateway, api.ServiceUnavailable),
        *(api.GatewayTimeout, api.Aborted, TransportError),
        *(web.ChunkedEncodingError, web.ConnectionError, web.Timeout),
        HTTPError,  # while the bytes of an object are read as they are stored
    )
    if isinstance(error, lost):
        return RefusalKind.UNREACHED if _UNREACHED.search(str(error)) else RefusalKind.LOST
    kinds = {
        api.TooManyRequests: RefusalKind.BUSY,
        api.Unauthorized: RefusalKind.EXPIRED,
        api.NotFound: RefusalKind.MISSING,
        api.Conflict: RefusalKind.CONFLICT,
        api.PreconditionFailed: RefusalKind.CONFLICT,
    }
    return next((kind for cls, kind in kinds.items() if isinstance(error, cls)), RefusalKind.REFUSED)


def platform_error(action: str, error: Exception) -> PlatformError:
    """Returns the error as one line: "cannot {action}: ..." and why."""
    return PlatformError(f"cannot {action}: {' '.join(_reason(_cause(error)).split())}")


def short_reason(error: Exception) -> str:
    """Returns the reason in a few words: "503 service unavailable"."""
    if refusal_kind(error) is RefusalKind.UNREACHED:
        return "not reached"
    error = _cause(error)
    code = getattr(error, "code", None)
    name = re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__).lower().removesuffix(" error")
    return f"{code} {name}" if code else "the connection was lost"


def _cause(error: Any) -> Any:
    """Returns the last error of a call with retries, HTTP errors as those of gRPC."""
    from google.api_core.exceptions import RetryError, from_http_response
    from requests.exceptions import HTTPError

    if isinstance(error, RetryError) and isinstance(error.cause, Exception):
        return _cause(error.cause)
    if isinstance(error, HTTPError) and error.response is not None:
        return from_http_response(error.response)  # type: ignore[no-untyped-call]
    return error


def _reason(error: Exception) -> str:
    from google.api_core import exceptions as api
    from google.auth.exceptions import DefaultCredentialsError, RefreshError

    message = str(getattr(error, "message", "") or error)
    kind, detail = refusal_kind(error), truncate(" ".join(message.split()).rstrip("."), 300)
    if isinstance(error, DefaultCredentialsError):
        return f"no credentials of Google Cloud were found; {_SIGN_IN}"
    if kind is RefusalKind.UNREACHED:
        advice = "check this machine's network connection and the location"
        return f"Google Cloud was not reached ({detail}); {advice}"
    if isinstance(error, RefreshError):
        return f"the credentials were refused ({detail}); {_SIGN_IN}"
    if isinstance(error, api.Forbidden):
        return _forbidden(error, detail)
    if isinstance(error, api.Aborted):
        return f"it was changed meanwhile: {detail}; try again"
    if isinstance(error, (api.BadRequest, api.FailedPrecondition)):
        return f"the platform refused it: {detail}"
    messages = {
        RefusalKind.BUSY: f"too many requests, or a quota is used up: {detail}; "
        "try again later or ask for more",
        RefusalKind.EXPIRED: f"not signed in ({detail}); {_SIGN_IN}",
        RefusalKind.MISSING: f"not found: {detail}; check the name, the project and the location",
        RefusalKind.CONFLICT: f"it exists already: {detail}; choose another id",
        RefusalKind.LOST: f"the service failed or the connection was lost ({short_reason(error)}: {detail}); "
        "try again later",
    }
    return messages.get(kind, detail)


def _forbidden(error: Any, detail: str) -> str:
    facts, match = dict(error.metadata or {}), _PERMISSION.search(detail)
    if error.reason == "SERVICE_DISABLED":
        return f"{detail}; run 'gcloud services enable {facts.get('service', 'aiplatform.googleapis.com')}'"
    permission = facts.get("permission") or (match and (match[1] or match[2]))
    if _ACT_AS.search(detail):
        permission = "iam.serviceAccounts.actAs"
    if not permission:
        return f"permission denied to {_account()}: {detail}"
    on = f"on {facts['resource']}" if "resource" in facts else f"({detail})"
    roles = (role for beginning, role in _ROLES.items() if permission.startswith(beginning))
    role = next(roles, "a role that includes it")
    return f"permission {permission} is missing {on}; grant {role} to {_account()}"


def _account() -> str:
    import google.auth
    from google.auth.exceptions import GoogleAuthError

    try:
        credentials, _ = google.auth.default()
    except GoogleAuthError:
        return "your account"
    name = getattr(credentials, "service_account_email", "") or getattr(credentials, "account", "")
    return name or "your account"
