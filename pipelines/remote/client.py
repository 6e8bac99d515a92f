"""Calls of the platform: clients for one place, tried again where that is safe, failures in one line.

Google's REST APIs for which a client library would be one package more for one call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from shardline.pipelines.remote.environment import Environment
from shardline.trainer import progress

if TYPE_CHECKING:
    from google.api_core.retry import Retry
    from google.auth.transport.requests import AuthorizedSession
    from google.cloud.aiplatform_v1 import (
        JobServiceClient,
        ModelServiceClient,
        PipelineServiceClient,
        ScheduleServiceClient,
    )

T = TypeVar("T")

#: Seconds for which one attempt may take.
_ATTEMPT_S = 30.0
#: Seconds for which a service that is busy is asked again.
_PATIENCE_S = 60.0
#: Seconds for which a service that was never reached is asked again: the network is not there.
_UNREACHED_S = 3.0
#: Seconds for both of them while a run is watched, which may take days.
_WATCHING_S = 900.0


@dataclass(frozen=True)
class Clients:
    """Clients of the platform's services in one place, each made when it is first used."""

    environment: Environment

    @cached_property
    def pipelines(self) -> PipelineServiceClient:
        """Runs of pipelines."""
        from google.cloud.aiplatform_v1 import PipelineServiceClient

        return self._make(PipelineServiceClient)

    @cached_property
    def schedules(self) -> ScheduleServiceClient:
        """Schedules."""
        from google.cloud.aiplatform_v1 import ScheduleServiceClient

        return self._make(ScheduleServiceClient)

    @cached_property
    def jobs(self) -> JobServiceClient:
        """Custom jobs and hyperparameter tuning jobs."""
        from google.cloud.aiplatform_v1 import JobServiceClient

        return self._make(JobServiceClient)

    @cached_property
    def models(self) -> ModelServiceClient:
        """The Model Registry."""
        from google.cloud.aiplatform_v1 import ModelServiceClient

        return self._make(ModelServiceClient)

    def _make(self, kind: type[T]) -> T:
        from google.api_core.client_options import ClientOptions

        with platform_errors("sign in to Google Cloud"):
            return kind(client_options=ClientOptions(api_endpoint=self.environment.host))  # type: ignore[call-arg]


def clients(environment: Environment) -> Clients:
    """Returns the clients for an environment; nothing is loaded or reached before one is used."""
    return Clients(environment)


def ask(
    doing: str,
    method: Callable[..., T],
    request: Any,
    *,
    repeatable: bool = True,
    watching: bool = False,
    made: Callable[[], T] | None = None,
) -> T:
    """Calls the platform, and again where it was busy or the connection was lost.

    Args:
        doing: What fails if the call does: "submit the pipeline".
        method: Method of a client: `clients.pipelines.get_pipeline_job`.
        request: Its request, a message or a dictionary.
        repeatable: Whether the call may have been done already when it is done again. One that may not is
            tried again only where the platform says that it has done nothing (429, or 401 with an old token).
        watching: Whether something that takes long is being watched, and no answer is no hurry.
        made: Of a call that creates something under an id of our choice: returns what an earlier attempt has
            created, of which the answer was lost.

    Raises:
        PlatformError: When the platform refuses, fails or is not reached.
    """
    from google.api_core.exceptions import AlreadyExists
    from google.api_core.timeout import ConstantTimeout

    attempts = _Attempts(doing, credentials_of(method), repeatable=repeatable, watching=watching)
    timeout = ConstantTimeout(_ATTEMPT_S)  # type: ignore[no-untyped-call]
    with platform_errors(doing):
        try:
            return method(request=request, retry=attempts.retry(), timeout=timeout)
        except AlreadyExists:
            if made is None or not attempts.failed:
                raise
        return made()


def ask_all(
    doing: str, method: Callable[..., Iterable[T]], request: Any, *, limit: int | None = None
) -> list[T]:
    """Calls a method that lists, page by page, as `ask` does.

    Args:
        doing: What fails if the call does.
        method: Method of a client: `clients.pipelines.list_pipeline_jobs`.
        request: Its request.
        limit: How many items at most; None for all.
    """
    from itertools import islice

    with platform_errors(doing):  # the pages after the first one are asked for while they are read
        return list(islice(ask(doing, method, request), limit))


def again(doing: str, credentials: Any = None) -> Retry:
    """Returns api_core's retry for calls of other clients of Google, and of requests, that may be repeated.

    Args:
        doing: What fails if the call does.
        credentials: What it signs in with; a token that is refused is then replaced, once.
    """
    return _Attempts(doing, credentials).retry()


def credentials_of(method: Callable[..., Any]) -> Any:
    """Returns what a method of a client signs in with; None when it does not say."""
    transport = getattr(getattr(method, "__self__", None), "transport", None)
    return getattr(transport, "_credentials", None)


@contextlib.contextmanager
def platform_errors(doing: str) -> Iterator[None]:
    """Turns what Google's clients raise into one line.

    Args:
        doing: What was being done: "submit the pipeline".

    Raises:
        PlatformError: "cannot submit the pipeline: ..."
    """
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    from shardline.pipelines.remote.refusals import refusal

    try:
        yield
    except (GoogleAPIError, GoogleAuthError, RequestException) as error:
        raise refusal(doing, error) from error


class _Attempts:
    """Decides whether a call is tried again, and says so."""

    def __init__(
        self, doing: str, credentials: Any, *, repeatable: bool = True, watching: bool = False
    ) -> None:
        self.failed = 0
        self._doing = doing
        self._credentials = credentials
        self._repeatable = repeatable
        self._watching = watching
        self._begin = time.monotonic()

    def retry(self) -> Retry:
        from google.api_core.retry import Retry

        return Retry(
            predicate=self._may_pass,
            initial=0.5,
            maximum=60.0 if self._watching else 8.0,
            timeout=_WATCHING_S + _ATTEMPT_S,
            on_error=self._say,
        )

    def _may_pass(self, error: Exception) -> bool:
        from shardline.pipelines.remote.refusals import is_busy, is_expired, is_lost, is_unreached

        passing = is_busy(error) or (self._repeatable and is_lost(error))
        unreached = is_unreached(error)
        patience_s = _WATCHING_S if self._watching else _UNREACHED_S if unreached else _PATIENCE_S
        if is_expired(error) and self._credentials is not None:
            # gRPC renews a token by the clock only, and not when the platform refuses it.
            self._credentials.token, self._credentials = None, None
        elif not passing or time.monotonic() - self._begin > patience_s:
            return False
        self.failed += 1
        return True

    def _say(self, error: Exception) -> None:
        from shardline.pipelines.remote.refusals import in_short, is_unreached

        if self._watching or not is_unreached(error):  # else it is over before it has been read
            progress.say("vertex", f"cannot {self._doing} yet ({in_short(error)}); trying again")


_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Rest:
    """A session in the name of this process's account.

    All methods raise what `platform_errors` turns into one line.
    """

    session: AuthorizedSession

    def get(self, api: str, path: str, **query: str | Sequence[str]) -> dict[str, Any]:
        """Returns what an API, "iam", has at a path, "v1/projects/..."."""
        return self._call("GET", api, path, params=query)

    def post(self, api: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a question that needs a body; it may be asked again."""
        return self._call("POST", api, path, json=body)

    def find(self, api: str, path: str) -> dict[str, Any] | None:
        """Returns what an API has at a path, or None where there is nothing."""
        from requests.exceptions import HTTPError

        try:
            return self.get(api, path)
        except HTTPError as error:
            if error.response is not None and error.response.status_code == 404:
                return None
            raise

    def quota(self, project: str, location: str, metric: str) -> int | None:
        """Returns the limit of a quota in a region, -1 for none, or None where nobody knows it.

        Source: https://cloud.google.com/service-usage/docs/reference/rest/v1beta1/services.consumerQuotaMetrics
        """
        name = quote(f"aiplatform.googleapis.com/{metric}", safe="")
        parent = f"v1beta1/projects/{project}/services/aiplatform.googleapis.com"
        found = self.find("serviceusage", f"{parent}/consumerQuotaMetrics/{name}")
        for limit in (found or {}).get("consumerQuotaLimits", ()):
            for bucket in limit.get("quotaBuckets", ()):
                if bucket.get("dimensions", {}).get("region") == location:
                    return int(bucket.get("effectiveLimit", 0))
        return None

    def _call(self, verb: str, api: str, path: str, **content: Any) -> dict[str, Any]:
        def call() -> dict[str, Any]:
            url = f"https://{api}.googleapis.com/{path}"
            response = self.session.request(verb, url, timeout=_TIMEOUT_S, **content)  # type: ignore[no-untyped-call]
            response.raise_for_status()
            return dict(response.json())

        answer: dict[str, Any] = again(f"ask {api}.googleapis.com")(call)()
        return answer


def connect() -> tuple[Rest, str]:
    """Returns a session, and in whose name it speaks.

    Raises:
        PlatformError: When there are no credentials, or they are refused.
    """
    import google.auth
    from google.auth.transport.requests import AuthorizedSession, Request

    with platform_errors("sign in to Google Cloud"):
        credentials, _ = google.auth.default(scopes=_SCOPES)
        credentials.refresh(Request())  # type: ignore[no-untyped-call]
    account = getattr(credentials, "service_account_email", "") or getattr(credentials, "account", "")
    session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
    return Rest(session), account or "a user's credentials"
