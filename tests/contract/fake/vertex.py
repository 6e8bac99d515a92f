"""The whole fake: servers, proxy and storage, and the environment in which clients find them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gcp_storage_emulator.server import create_server
from google.cloud.aiplatform_v1.services.job_service.transports import grpc as jobs_grpc
from google.cloud.aiplatform_v1.services.job_service.transports import rest_base as jobs_rest
from google.cloud.aiplatform_v1.services.model_service.transports import grpc as models_grpc
from google.cloud.aiplatform_v1.services.model_service.transports import rest_base as models_rest
from google.cloud.aiplatform_v1.types import CustomJob
from google.cloud.resourcemanager_v3.services.projects.transports import grpc as projects_grpc
from google.cloud.resourcemanager_v3.services.projects.transports import rest_base as projects_rest

from tests.contract.fake.certificates import write_certificates, write_service_account
from tests.contract.fake.rpcs import rpcs_of
from tests.contract.fake.servers import serve_grpc, serve_proxy, serve_rest
from tests.contract.fake.services import PROJECT, FakeServices, Outcome

LOCATION = "europe-west4"
BUCKET = "staging"
_HOSTS = (f"{LOCATION}-aiplatform.googleapis.com", "cloudresourcemanager.googleapis.com")


@dataclass(frozen=True)
class FakeVertex:
    """A fake that is running.

    Attributes:
        services: What it knows.
        environment: Variables with which an unmodified client, in a process of its own, talks to it.
        rest_endpoint: Where it speaks REST.
        refused: What clients have asked the proxy for beside it.
    """

    services: FakeServices
    environment: dict[str, str]
    rest_endpoint: str
    refused: list[str]

    @property
    def job(self) -> CustomJob:
        """The only job."""
        (job,) = self.services.jobs.values()
        return job


@contextlib.contextmanager
def fake_vertex(
    directory: Path, run: Callable[[CustomJob], Outcome] = lambda job: Outcome()
) -> Iterator[FakeVertex]:
    """Runs a fake.

    Args:
        directory: For keys and certificates.
        run: What a custom job does.
    """
    services = FakeServices(run)
    rpcs = rpcs_of(jobs_grpc.JobServiceGrpcTransport, jobs_rest)
    rpcs |= rpcs_of(models_grpc.ModelServiceGrpcTransport, models_rest)
    rpcs |= rpcs_of(projects_grpc.ProjectsGrpcTransport, projects_rest)
    files = write_certificates(directory, _HOSTS)
    with contextlib.ExitStack() as stack:
        grpc_port = stack.enter_context(serve_grpc(services, rpcs, files))
        rest_port = stack.enter_context(serve_rest(services, rpcs))
        https_port = stack.enter_context(serve_rest(services, rpcs, files))
        proxy_port, refused = stack.enter_context(serve_proxy(_HOSTS, grpc_port, https_port))
        rest = f"http://127.0.0.1:{rest_port}"
        account = write_service_account(directory / "account.json", f"{rest}/token")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            "https_proxy": f"http://127.0.0.1:{proxy_port}",
            "HTTPS_PROXY": f"http://127.0.0.1:{proxy_port}",
            "no_proxy": "127.0.0.1,localhost",
            "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(files.authority),
            "REQUESTS_CA_BUNDLE": str(files.authority),
            "GOOGLE_APPLICATION_CREDENTIALS": str(account),
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            "NO_GCE_CHECK": "true",
            "STORAGE_EMULATOR_HOST": stack.enter_context(_storage()),
        }
        yield FakeVertex(services, environment, rest, refused)


@contextlib.contextmanager
def _storage() -> Iterator[str]:
    """Cloud Storage with one empty bucket."""
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        yield f"http://127.0.0.1:{server._api._httpd.server_port}"
    finally:
        server.stop()
