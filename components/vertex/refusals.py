"""Errors of the platform: their kind, and one line that says what happened and what to do."""

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
