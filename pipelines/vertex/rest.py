"""Google's REST APIs for which a client library would be one package more for one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shardline.pipelines.vertex.calls import again, platform_errors

if TYPE_CHECKING:
    from google.auth.transport.requests import AuthorizedSession

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
