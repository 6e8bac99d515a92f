"""The whole fake: servers, proxy and storage, and the environment in which clients find them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import HTTPServer
from pathlib import Path

import requests
from gcp_storage_emulator.server import RequestHandler, create_server
from google.cloud.aiplatform_v1.services.endpoint_service.transports import grpc as endpoints_grpc
from google.cloud.aiplatform_v1.services.endpoint_service.transports import rest_base as endpoints_rest
from google.cloud.aiplatform_v1.services.job_service.transports import grpc as jobs_grpc
from google.cloud.aiplatform_v1.services.job_service.transports import rest_base as jobs_rest
from google.cloud.aiplatform_v1.services.model_service.transports import grpc as models_grpc
from google.cloud.aiplatform_v1.services.model_service.transports import rest_base as models_rest
from google.cloud.aiplatform_v1.services.pipeline_service.transports import grpc as pipelines_grpc
from google.cloud.aiplatform_v1.services.pipeline_service.transports import rest_base as pipelines_rest
from google.cloud.aiplatform_v1.services.schedule_service.transports import grpc as schedules_grpc
from google.cloud.aiplatform_v1.services.schedule_service.transports import rest_base as schedules_rest
from google.cloud.aiplatform_v1.types import CustomJob
from google.cloud.logging_v2.services.logging_service_v2.transports import base as logging_base
from google.cloud.logging_v2.services.logging_service_v2.transports import grpc as logging_grpc
from google.cloud.resourcemanager_v3.services.projects.transports import grpc as projects_grpc
from google.cloud.resourcemanager_v3.services.projects.transports import rest_base as projects_rest
from google.cloud.secretmanager_v1.services.secret_manager_service.transports import grpc as secrets_grpc
from google.cloud.secretmanager_v1.services.secret_manager_service.transports import rest_base as secrets_rest

from tests.contract.fake.api import LOCATION
from tests.contract.fake.certificates import HOSTS, certificates, write_service_account
from tests.contract.fake.pipeline_jobs import PipelineOutcome, RunPipeline
from tests.contract.fake.proxy import Tunnels, serve_proxy
from tests.contract.fake.rpcs import Rpc, rpcs_of
from tests.contract.fake.servers import serve_grpc, serve_rest
from tests.contract.fake.services import PROJECT, FakeServices, Outcome
from tests.helpers.serving import running

BUCKET = "staging"


@dataclass(frozen=True)
class FakeVertex:
    """A fake that is running.

    An unmodified client in a process of its own talks to it with the variables of `environment`; `refused` is
    what clients have asked the proxy for beside it.
    """

    services: FakeServices
    environment: dict[str, str]
    refused: list[str]

    @property
    def job(self) -> CustomJob:
        """The only job."""
        (job,) = self.services.jobs.values()
        return job


@contextlib.contextmanager
def fake_vertex(
    directory: Path,
    run: Callable[[CustomJob], Outcome] = lambda job: Outcome(),
    run_pipeline: RunPipeline = lambda job: PipelineOutcome(),
) -> Iterator[FakeVertex]:
    """Runs a fake, with the key of a service account in the directory, and what jobs do."""
    services = FakeServices(run, run_pipeline)
    rpcs = _rpcs()
    files = certificates()
    with contextlib.ExitStack() as stack:
        tunnels = Tunnels()
        grpc_port = stack.enter_context(serve_grpc(services, rpcs, files, tunnels.cut))
        rest_port = stack.enter_context(serve_rest(services, rpcs))
        https_port = stack.enter_context(serve_rest(services, rpcs, files))
        proxy_port, refused = stack.enter_context(serve_proxy(HOSTS, grpc_port, https_port, tunnels))
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
        yield FakeVertex(services, environment, refused)


@functools.cache
def _rpcs() -> dict[str, Rpc]:
    """The calls that the fake knows of from clients."""
    rpcs = rpcs_of(jobs_grpc.JobServiceGrpcTransport, jobs_rest)
    rpcs |= rpcs_of(endpoints_grpc.EndpointServiceGrpcTransport, endpoints_rest)
    rpcs |= rpcs_of(models_grpc.ModelServiceGrpcTransport, models_rest)
    rpcs |= rpcs_of(pipelines_grpc.PipelineServiceGrpcTransport, pipelines_rest)
    rpcs |= rpcs_of(schedules_grpc.ScheduleServiceGrpcTransport, schedules_rest)
    rpcs |= rpcs_of(projects_grpc.ProjectsGrpcTransport, projects_rest)
    # This client has no REST transport of the same kind.
    rpcs |= rpcs_of(logging_grpc.LoggingServiceV2GrpcTransport, logging_base)
    return rpcs | rpcs_of(secrets_grpc.SecretManagerServiceGrpcTransport, secrets_rest)


@contextlib.contextmanager
def _storage() -> Iterator[str]:
    """Cloud Storage with one empty bucket."""
    storage = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)._storage
    # Its own server looks every half second whether it has to stop.
    with running(HTTPServer(("127.0.0.1", 0), functools.partial(RequestHandler, storage))) as port:
        address = f"http://127.0.0.1:{port}"
        place = {"location": LOCATION.upper()}
        requests.patch(f"{address}/storage/v1/b/{BUCKET}", json=place).raise_for_status()
        yield address
