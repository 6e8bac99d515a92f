"""Refusals of the platform: what Google's clients raise, by kind, and as one line that says what to do."""

from __future__ import annotations

import enum
import re
from typing import Any

from shardline.components.text import truncate
from shardline.trainer.base.errors import PlatformError

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

#: A permission as messages name it.
_PERMISSION = re.compile(r"[Pp]ermission ['\"]?(\w+(?:\.\w+){2,})|['\"](\w+(?:\.\w+){2,})['\"] permission")
_ACT_AS = re.compile(r"act as (?:the )?service[_ ]account")
#: What gRPC, requests and google-auth say of a server that was never spoken to.
_UNREACHED = re.compile(
    "certificate|proxy|lookup failed|resolution|failed to resolve|connection refused|connect timeout|"
    "failed to connect|failed to establish|metadata from plugin",
    re.IGNORECASE,
)
_SIGN_IN = "run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS to a key file"


class RefusalKind(enum.Enum):
    """What a failed call means for the next attempt."""

    BUSY = "refused for now, without having done anything (429)"
    EXPIRED = "the token was refused (401)"
    MISSING = "there is no such thing (404)"
    CONFLICT = "it is there already, or was changed meanwhile (409, 412)"
    UNREACHED = "the service was never spoken to: the network is not there, or not that far"
    LOST = "done or not done: 5xx, no answer in time, connection lost"
    REFUSED = "refused for good"


def refusal_kind(error: BaseException | None) -> RefusalKind:
    """Returns what a failed call means for the next attempt."""
    from google.api_core import exceptions as api
    from google.auth.exceptions import TransportError
    from requests import exceptions as web

    error = _last(error)
    lost = (
        *(api.InternalServerError, api.Unknown, api.BadGateway, api.ServiceUnavailable),
        *(api.GatewayTimeout, api.Aborted, TransportError),
        *(web.ChunkedEncodingError, web.ConnectionError, web.Timeout),
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


def platform_error(doing: str, error: Exception) -> PlatformError:
    """Returns the error that says in one line why something could not be done."""
    return PlatformError(f"cannot {doing}: {' '.join(_reason(_last(error)).split())}")


def short_reason(error: Exception) -> str:
    """Returns what happened, in a few words."""
    if refusal_kind(error) is RefusalKind.UNREACHED:
        return "not reached"
    error = _last(error)
    code = getattr(error, "code", None)
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__).lower().removesuffix(" error")
    return f"{code} {words}" if code else "the connection was lost"


def _last(error: Any) -> Any:
    """Returns what happened last in a call that was tried several times; HTTP errors as gRPC's have them."""
    from google.api_core.exceptions import RetryError, from_http_response
    from requests.exceptions import HTTPError

    if isinstance(error, RetryError) and isinstance(error.cause, Exception):
        return _last(error.cause)
    if isinstance(error, HTTPError) and error.response is not None:
        return from_http_response(error.response)  # type: ignore[no-untyped-call]
    return error


def _reason(error: Exception) -> str:
    from google.api_core import exceptions as api
    from google.auth.exceptions import DefaultCredentialsError, RefreshError

    message = str(getattr(error, "message", "") or error)
    kind, said = refusal_kind(error), truncate(" ".join(message.split()).rstrip("."), 300)
    if isinstance(error, DefaultCredentialsError):
        return f"no credentials of Google Cloud were found; {_SIGN_IN}"
    if kind is RefusalKind.UNREACHED:
        return (
            f"Google Cloud was not reached ({said}); check this machine's network connection and the location"
        )
    if isinstance(error, RefreshError):
        return f"the credentials were refused ({said}); {_SIGN_IN}"
    if isinstance(error, api.Forbidden):
        return _forbidden(error, said)
    if isinstance(error, api.Aborted):
        return f"something else has changed it meanwhile: {said}; try again"
    if isinstance(error, (api.BadRequest, api.FailedPrecondition)):
        return f"the platform refused it: {said}"
    words = {
        RefusalKind.BUSY: f"too many requests, or a quota is used up: {said}; "
        "try again later or ask for more",
        RefusalKind.EXPIRED: f"not signed in ({said}); {_SIGN_IN}",
        RefusalKind.MISSING: f"not found: {said}; look for a mistyped name, project or location",
        RefusalKind.CONFLICT: f"it is there already: {said}; choose another id, or look at what is there",
        RefusalKind.LOST: f"the service did not answer as it should ({short_reason(error)}: {said}); "
        "try again later",
    }
    return words.get(kind, said)


def _forbidden(error: Any, said: str) -> str:
    facts, found = dict(error.metadata or {}), _PERMISSION.search(said)
    if error.reason == "SERVICE_DISABLED":
        return f"{said}; run 'gcloud services enable {facts.get('service', 'aiplatform.googleapis.com')}'"
    permission = facts.get("permission") or (found and (found[1] or found[2]))
    if _ACT_AS.search(said):
        permission = "iam.serviceAccounts.actAs"
    if not permission:
        return f"permission denied to {_account()}: {said}"
    on = f"on {facts['resource']}" if "resource" in facts else f"({said})"
    roles = (role for beginning, role in _ROLES.items() if permission.startswith(beginning))
    role = next(roles, "a role that has it")
    return f"permission {permission} is missing {on}; grant {role} to {_account()}"


def _account() -> str:
    """Returns the account in whose name this process speaks to the platform."""
    import google.auth
    from google.auth.exceptions import GoogleAuthError

    try:
        credentials, _ = google.auth.default()
    except GoogleAuthError:
        return "your account"
    name = getattr(credentials, "service_account_email", "") or getattr(credentials, "account", "")
    return name or "your account"
