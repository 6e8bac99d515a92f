"""Endpoints, the models that are deployed to them, and batch predictions.

Sources: the comments in google/cloud/aiplatform/v1/endpoint_service.proto, endpoint.proto and
batch_prediction_job.proto.
"""

from __future__ import annotations

from collections.abc import Callable

from google.cloud.aiplatform_v1.types import (
    BatchPredictionJob,
    Endpoint,
    JobState,
    endpoint_service,
    job_service,
)
from google.longrunning import operations_pb2

from tests.contract.fake.api import done, find, location, numbered, refuse
from tests.contract.fake.models import Models


class Endpoints:
    """Answers the calls of endpoints and batch predictions.

    Attributes:
        endpoints: By name, with what is deployed to them and how their traffic is shared.
        predictions: Batch prediction jobs by name, as they were received, all of them done.
    """

    def __init__(self, models: Models, number: Callable[[], int]) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self.predictions: dict[str, BatchPredictionJob] = {}
        self._models = models
        self._number = number

    def create_endpoint(self, request: endpoint_service.CreateEndpointRequest) -> operations_pb2.Operation:
        """Answers with an operation that is done: the launcher looks at one that is not after 20 s."""
        endpoint = request.endpoint
        if not 1 <= len(endpoint.display_name) <= 128:
            refuse("endpoint.display_name: must have 1 to 128 characters")
        endpoint.name = f"{location(request.parent)}/endpoints/{self._number()}"
        self.endpoints[endpoint.name] = endpoint
        return done(f"{endpoint.name}/operations/{self._number()}", Endpoint.pb(endpoint))

    def get_endpoint(self, request: endpoint_service.GetEndpointRequest) -> Endpoint:
        found: Endpoint = find(self.endpoints, request.name)
        return found

    def deploy_model(self, request: endpoint_service.DeployModelRequest) -> operations_pb2.Operation:
        endpoint: Endpoint = find(self.endpoints, request.endpoint)
        deployed = request.deployed_model
        self._model_is_there(deployed.model)
        machines = deployed.dedicated_resources
        split = dict(request.traffic_split)
        known = {"0", *(model.id for model in endpoint.deployed_models)}
        refuse(
            *(f"traffic_split: no deployed model {model}" for model in sorted(set(split) - known)),
            *(["traffic_split: must add up to 100"] if split and sum(split.values()) != 100 else []),
            *([] if machines.machine_spec.machine_type else ["machine_spec.machine_type: is required"]),
            *([] if machines.min_replica_count >= 1 else ["min_replica_count: must be at least 1"]),
        )
        deployed.id = str(self._number())
        endpoint.deployed_models.append(deployed)
        if split:
            endpoint.traffic_split = {deployed.id if key == "0" else key: n for key, n in split.items()}
        response = endpoint_service.DeployModelResponse(deployed_model=deployed)
        name = f"{endpoint.name}/operations/{self._number()}"
        return done(name, endpoint_service.DeployModelResponse.pb(response))

    def create_batch_prediction_job(
        self, request: job_service.CreateBatchPredictionJobRequest
    ) -> BatchPredictionJob:
        parent = location(request.parent)
        job = request.batch_prediction_job
        self._model_is_there(job.model)
        target = job.output_config.gcs_destination.output_uri_prefix
        sources = job.input_config.gcs_source.uris
        refuse(
            *([] if sources else ["input_config.gcs_source.uris: is required"]),
            *(f"input_config.gcs_source.uris: {uri!r}" for uri in sources if not uri.startswith("gs://")),
            *([] if target.startswith("gs://") else [f"output_config.gcs_destination: {target!r}"]),
            *(
                []
                if job.dedicated_resources.machine_spec.machine_type
                else ["dedicated_resources: is required"]
            ),
        )
        job.name = f"{parent}/batchPredictionJobs/{self._number()}"
        job.state = JobState.JOB_STATE_SUCCEEDED
        job.output_info.gcs_output_directory = f"{target}/prediction-1"
        self.predictions[job.name] = job
        return job

    def get_batch_prediction_job(
        self, request: job_service.GetBatchPredictionJobRequest
    ) -> BatchPredictionJob:
        found: BatchPredictionJob = find(self.predictions, request.name)
        return found

    def _model_is_there(self, name: str) -> None:
        if numbered(name).partition("@")[0] not in self._models.models:
            refuse(f"model: no model {name!r}")
