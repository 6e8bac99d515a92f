"""What Google's clients raise, in one line."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.rpc import error_details_pb2

from shardline.components.vertex import RefusalKind, platform_errors, refusal_kind, retry_policy
from shardline.trainer.base.errors import PlatformError


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name, value in (("GOOGLE_APPLICATION_CREDENTIALS", ""), ("CLOUDSDK_CONFIG", str(tmp_path))):
        monkeypatch.setenv(name, value)


def http_error(status: int, message: str) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    response._content = f'{{"error": {{"message": "{message}"}}}}'.encode()
    response.request = requests.Request("GET", "https://artifactregistry.googleapis.com/v1/x").prepare()
    return requests.HTTPError(response=response)


DISABLED = error_details_pb2.ErrorInfo(
    reason="SERVICE_DISABLED", metadata={"service": "secretmanager.googleapis.com"}
)
ACT_AS = "permission iam.serviceAccounts.actAs is missing (You do not have"
QUOTA = "The following quota metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training"
DENIED = "Permission 'storage.objects.get' denied on resource '//storage.googleapis.com/projects/_/b'"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (api.PermissionDenied(DENIED), f"permission storage.objects.get is missing ({DENIED}); grant roles/"),
        (api.PermissionDenied("You do not have permission to act as service_account: a@b.iam"), ACT_AS),
        (api.PermissionDenied("no"), "permission denied to your account: no"),
        (api.PermissionDenied("Permission 'compute.networks.use' denied"), "grant a role that includes it"),
        (api.PermissionDenied("not used", error_info=DISABLED), "'gcloud services enable secretmanager."),
        (http_error(403, DENIED.replace("'", "")), "permission storage.objects.get is missing ("),
        (http_error(404, "no such package"), "not found: "),
        (api.ResourceExhausted(QUOTA), f"a quota is used up: {QUOTA}"),
        (api.TooManyRequests("slow down"), "too many requests, or a quota is used up: slow down; try again"),
        (api.RetryError("given up", cause=api.ServiceUnavailable("busy")), "503 service unavailable: busy"),
        (api.Aborted("race"), "it was changed meanwhile: race; try again"),
        (auth.DefaultCredentialsError("none"), "no credentials of Google Cloud were found"),
        (auth.RefreshError("invalid_grant: expired"), "the credentials were refused"),
        (auth.TransportError("Failed to resolve it"), "Google Cloud was not reached (Failed to resolve it"),
        (requests.ConnectTimeout("connect timeout=3"), "Google Cloud was not reached (connect timeout=3)"),
        (api.Unauthenticated("who?"), "not signed in (who?); run 'gcloud auth"),
        (api.InvalidArgument("a\nb"), "the platform refused it: a b"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(error: Exception, expected: str) -> None:
    with pytest.raises(PlatformError) as raised, platform_errors("do it"):
        raise error
    assert str(raised.value).startswith("cannot do it: ")
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 3


def test_a_mistake_of_our_own_is_not_the_platforms() -> None:
    with pytest.raises(ZeroDivisionError), platform_errors("do it"):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (api.ResourceExhausted("x"), RefusalKind.BUSY),
        (api.ServiceUnavailable("The service is currently unavailable."), RefusalKind.LOST),
        (api.ServiceUnavailable("DNS resolution failed for x"), RefusalKind.UNREACHED),
        (requests.ConnectionError("Connection aborted."), RefusalKind.LOST),
        (requests.exceptions.ChunkedEncodingError("Connection broken"), RefusalKind.LOST),
        (api.InvalidArgument("proxy"), RefusalKind.REFUSED),  # an answer
        (api.NotFound("x"), RefusalKind.MISSING),
        (http_error(409, "is there"), RefusalKind.CONFLICT),
    ],
)
def test_kinds_of_failures(error: Exception, kind: RefusalKind) -> None:
    assert refusal_kind(error) is kind


def test_a_token_is_replaced_once() -> None:
    class Credentials:
        token: str | None = "old"

    credentials, tokens = Credentials(), []

    def call() -> None:
        tokens.append(credentials.token)
        raise api.Unauthenticated("old token")

    with pytest.raises(api.Unauthenticated):
        retry_policy("do it", credentials)(call)()
    assert tokens == ["old", None]
