"""The project that all belongs to: its APIs, accounts, permissions and secrets.

Sources: the discovery documents of cloudresourcemanager v3, iam v1 and serviceusage v1.
"""

from __future__ import annotations

import json
from typing import Any

from google.cloud import resourcemanager_v3, secretmanager_v1
from google.rpc import code_pb2

from tests.contract.fake.api import PROJECT, PROJECT_NUMBER, ApiError
from tests.contract.fake.web import WebRequest, route

_MANAGER = r"cloudresourcemanager\.googleapis\.com"
_IAM = r"iam\.googleapis\.com"
_USAGE = r"serviceusage\.googleapis\.com"

PROJECT_ROUTES = (
    route("TestProjectPermissions", "POST", _MANAGER, "/v3/projects/{project}:testIamPermissions"),
    route("GetServiceAccount", "GET", _IAM, "/v1/projects/{project}/serviceAccounts/{account}"),
    route(
        "TestAccountPermissions",
        "POST",
        _IAM,
        "/v1/projects/{project}/serviceAccounts/{account}:testIamPermissions",
    ),
    route(
        "GetAllowedLocations",
        "GET",
        r"iamcredentials\.googleapis\.com",
        "/v1/projects/-/serviceAccounts/{account}/allowedLocations",
    ),
    route("BatchGetServices", "GET", _USAGE, "/v1/projects/{project}/services:batchGet"),
)


class Project:
    """Answers what clients ask of the project.

    Attributes:
        state: State of the project.
        disabled_apis: APIs that are not enabled: "logging.googleapis.com".
        denied: Permissions that the caller does not have.
        service_accounts: Whether each is enabled, by its address.
        secrets: What Secret Manager keeps, by "projects/P/secrets/NAME/versions/latest".
    """

    def __init__(self) -> None:
        self.state = resourcemanager_v3.Project.State.ACTIVE
        self.disabled_apis: set[str] = set()
        self.denied: set[str] = set()
        self.service_accounts: dict[str, bool] = {}
        self.secrets: dict[str, str] = {}

    def get_project(self, request: Any) -> resourcemanager_v3.Project:
        _check_project(request.name.removeprefix("projects/"))
        name = f"projects/{PROJECT_NUMBER}"
        return resourcemanager_v3.Project(name=name, project_id=PROJECT, state=self.state)

    def test_project_permissions(self, request: WebRequest) -> dict[str, Any]:
        _check_project(request.fields["project"])
        return self._granted(request)

    def get_service_account(self, request: WebRequest) -> dict[str, Any]:
        email = self._account(request)
        return {
            "name": f"projects/{PROJECT}/serviceAccounts/{email}",
            "email": email,
            "projectId": PROJECT,
            **({} if self.service_accounts[email] else {"disabled": True}),
        }

    def test_account_permissions(self, request: WebRequest) -> dict[str, Any]:
        self._account(request)
        return self._granted(request)

    def get_allowed_locations(self, request: WebRequest) -> dict[str, Any]:
        """Says that the account may be used everywhere: google-auth asks for it in the background."""
        return {"locations": [], "encodedLocations": "0x0"}

    def batch_get_services(self, request: WebRequest) -> dict[str, Any]:
        _check_project(request.fields["project"])
        return {
            "services": [
                {
                    "name": f"projects/{PROJECT_NUMBER}/services/{name.rpartition('/')[2]}",
                    "parent": f"projects/{PROJECT_NUMBER}",
                    "state": "DISABLED" if name.rpartition("/")[2] in self.disabled_apis else "ENABLED",
                }
                for name in request.query.get("names", [])
            ]
        }

    def access_secret_version(self, request: Any) -> secretmanager_v1.AccessSecretVersionResponse:
        if request.name not in self.secrets:
            raise ApiError(code_pb2.NOT_FOUND, f"Secret Version [{request.name}] not found.")
        data = self.secrets[request.name].encode()
        return secretmanager_v1.AccessSecretVersionResponse(name=request.name, payload={"data": data})

    def _granted(self, request: WebRequest) -> dict[str, Any]:
        asked = json.loads(request.body)["permissions"]
        return {"permissions": [name for name in asked if name not in self.denied]}

    def _account(self, request: WebRequest) -> str:
        email = request.fields["account"]
        if email not in self.service_accounts:
            raise ApiError(code_pb2.NOT_FOUND, f"Unknown service account: {email}")
        return email


def _check_project(name: str) -> None:
    if name not in (PROJECT, PROJECT_NUMBER):
        words = "The caller does not have permission"
        raise ApiError(code_pb2.PERMISSION_DENIED, f"{words} on projects/{name} (or it may not exist).")
