"""What Google's clients raise, as one line: what is missing, where, and what to do."""

from __future__ import annotations

import re
from typing import Any

from shardline.trainer.errors import PlatformError

#: The smallest role that has a permission, by the permission's beginning.
_ROLES = {
    "aiplatform.": "roles/aiplatform.user",
    "storage.buckets.": "roles/storage.legacyBucketReader",
    "storage.objects.": "roles/storage.objectUser",
    "artifactregistry.": "roles/artifactregistry.writer",
    "iam.serviceAccounts.actAs": "roles/iam.serviceAccountUser",
    "logging.": "roles/logging.viewer",
    "secretmanager.": "roles/secretmanager.secretAccessor",
}

_PERMISSION = re.compile(r"[Pp]ermission ['\"]?([a-zA-Z]+(?:\.[a-zA-Z]+)+)")
_RESOURCE = re.compile(r"(?:on|for) resource:? ['\"]?(?://[\w.-]+/)?([^\s'\"]+)")
_ACT_AS = re.compile(r"act as (?:the )?service[_ ]account:? ['\"]?([\w.-]+@[\w.-]+\w)")
_DISABLED = re.compile(r"has not been used in project|is disabled|it is not enabled")
_API = re.compile(r"\b([a-z]+\.googleapis\.com)")
_QUOTA = re.compile(r"metric '([^']+)'|\b([a-z]+\.googleapis\.com/[\w.-]+)")

#: Why a server was never spoken to, by what gRPC, requests and google-auth say, in lower case.
_UNREACHED = {
    "certificate": "its certificate is not trusted",
    "proxy": "the proxy did not connect",
    "lookup failed": "its name is not known",
    "resolution": "its name is not known",
    "failed to resolve": "its name is not known",
    "connection refused": "it refuses connections",
    "connect timeout": "it does not answer",
    "failed to connect": "it does not answer",
    "failed to establish": "it does not answer",
    "metadata from plugin": "nobody gives out tokens",
}
_HOST = re.compile(r"\b([a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:googleapis\.com|pkg\.dev|google\.com))")
_SIGN_IN = "run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS to a key file"


def refusal(doing: str, error: Exception) -> PlatformError:
    """Returns the error that says in one line why something could not be done."""
    return PlatformError(f"cannot {doing}: {' '.join(_reason(unwrap(error)).split())}")


def in_short(error: Exception) -> str:
    """Returns what happened, in some words."""
    error = unwrap(error)
    if is_unreached(error):
        return "not reached"
    code = getattr(error, "code", None)
    return f"{code} {_name(error)}" if code else "the connection was lost"


def is_busy(error: Exception) -> bool:
    """Whether a service has refused a call for now, without having done anything (429)."""
    from google.api_core.exceptions import TooManyRequests

    return isinstance(unwrap(error), TooManyRequests)


def is_lost(error: Exception) -> bool:
    """Whether it is not known what has become of a call: 5xx, no answer in time, connection lost."""
    from google.api_core import exceptions
    from google.auth.exceptions import TransportError
    from requests.exceptions import ChunkedEncodingError, ConnectionError, Timeout

    passing = (
        exceptions.InternalServerError,
        exceptions.Unknown,
        exceptions.BadGateway,
        exceptions.ServiceUnavailable,
        exceptions.GatewayTimeout,
        exceptions.Aborted,
        TransportError,
        ChunkedEncodingError,
        ConnectionError,
        Timeout,
    )
    return isinstance(unwrap(error), passing)


def is_expired(error: Exception) -> bool:
    """Whether a token was refused (401)."""
    from google.api_core.exceptions import Unauthorized

    return isinstance(unwrap(error), Unauthorized)


def is_missing(error: Exception) -> bool:
    """Whether something is not there (404)."""
    from google.api_core.exceptions import NotFound

    return isinstance(unwrap(error), NotFound)


def is_conflict(error: BaseException | None) -> bool:
    """Whether something is there already, or was changed meanwhile (409)."""
    from google.api_core.exceptions import Conflict

    return isinstance(error, Exception) and isinstance(unwrap(error), Conflict)


def is_unreached(error: Exception) -> bool:
    """Whether a service was never spoken to: the network is not there, or not that far."""
    return is_lost(error) and bool(_why_unreached(error))


def _why_unreached(error: Exception) -> str:
    words = str(unwrap(error)).lower()
    return next((why for phrase, why in _UNREACHED.items() if phrase in words), "")


def unwrap(error: Exception) -> Exception:
    """Returns what happened last in a call that was tried several times; HTTP errors as gRPC's have them."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError, from_http_response
    from requests.exceptions import HTTPError

    if isinstance(error, RetryError) and isinstance(error.cause, Exception):
        return unwrap(error.cause)
    if isinstance(error, HTTPError) and error.response is not None:
        found: GoogleAPICallError = from_http_response(error.response)  # type: ignore[no-untyped-call]
        return found
    return error


def _reason(error: Exception) -> str:
    from google.api_core import exceptions
    from google.auth.exceptions import DefaultCredentialsError, RefreshError

    if isinstance(error, DefaultCredentialsError):
        return f"no credentials of Google Cloud were found; {_SIGN_IN}"
    if is_unreached(error):
        host = _first(_HOST, str(error)) or "Google Cloud"
        why = _why_unreached(error)
        return f"{host} was not reached: {why}; is this machine connected, and is the location right?"
    if isinstance(error, RefreshError):
        return f"the credentials were refused ({_short(error)}); {_SIGN_IN}"
    if isinstance(error, exceptions.Unauthorized):
        return f"not signed in ({_short(error)}); {_SIGN_IN}"
    if isinstance(error, exceptions.Forbidden):
        return _forbidden(error)
    if isinstance(error, exceptions.TooManyRequests):
        return _exhausted(error)
    if isinstance(error, exceptions.NotFound):
        return f"not found: {_short(error)}; look for a mistyped name, project or location"
    if isinstance(error, exceptions.Aborted):
        return f"something else has changed it meanwhile: {_short(error)}; try again"
    if isinstance(error, exceptions.Conflict):
        return f"it is there already: {_short(error)}; choose another id, or look at what is there"
    if isinstance(error, (exceptions.BadRequest, exceptions.FailedPrecondition)):
        return f"the platform refused it: {_short(error)}"
    if is_lost(error):
        return (
            f"the service did not answer as it should ({in_short(error)}: {_short(error)}); try again later"
        )
    return _short(error)


def _forbidden(error: Any) -> str:
    text = _message(error)
    facts = dict(error.metadata or {})
    if error.reason == "SERVICE_DISABLED" or _DISABLED.search(text):
        found = _API.search(facts.get("service", "")) or _API.search(text)
        api = found[1] if found else "aiplatform.googleapis.com"
        return f"the API {api} is not enabled in this project; run 'gcloud services enable {api}'"
    if found := _ACT_AS.search(text):
        return (
            f"permission iam.serviceAccounts.actAs is missing on {found[1]}; "
            f"grant {_ROLES['iam.serviceAccounts.actAs']} on it to {_account()}"
        )
    permission = facts.get("permission") or _first(_PERMISSION, text)
    if not permission:
        return f"permission denied: {_short(error)}; ask for it to be granted to {_account()}"
    resource = facts.get("resource") or _first(_RESOURCE, text)
    on = f" on {resource}" if resource else ""
    return f"permission {permission} is missing{on}; grant {role_of(permission)} to {_account()}"


def role_of(permission: str) -> str:
    """Returns a role that has a permission."""
    roles = (role for beginning, role in _ROLES.items() if permission.startswith(beginning))
    return next(roles, "a role that has it")


def _exhausted(error: Any) -> str:
    text = _message(error)
    metric = dict(error.metadata or {}).get("quota_metric") or _first(_QUOTA, text)
    if metric:
        return f"the quota {metric} is used up ({_short(error)}); wait, or ask for more of it in the console"
    return f"too many requests ({_short(error)}); try again later"


def _account() -> str:
    """Returns as whom this process speaks to the platform."""
    import google.auth
    from google.auth.exceptions import GoogleAuthError

    try:
        credentials, _ = google.auth.default()
    except GoogleAuthError:
        return "your account"
    name = getattr(credentials, "service_account_email", "") or getattr(credentials, "account", "")
    return name or "your account"


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return next((group for group in found.groups() if group), "") if found else ""


def _name(error: Exception) -> str:
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", type(error).__name__).lower()
    return words.removesuffix(" error")


def _message(error: Exception) -> str:
    return str(getattr(error, "message", "") or error)


def _short(error: Exception) -> str:
    text = " ".join(_message(error).split()).rstrip(".")
    return text if len(text) <= 300 else f"{text[:297]}..."
