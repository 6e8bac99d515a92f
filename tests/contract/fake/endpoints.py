"""Endpoints, the models that are deployed to them and what those answer.

Sources: the comments in google/cloud/aiplatform/v1/endpoint_service.proto, endpoint.proto and
prediction_service.proto.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from google.cloud.aiplatform_v1.types import (
    DeployedModel,
    Endpoint,
    endpoint_service,
    prediction_service,
)
from google.longrunning import operations_pb2
from google.protobuf import json_format
from google.rpc import code_pb2

from tests.contract.fake.api import ApiError, done, find, location, now, numbered, refuse
from tests.contract.fake.models import Models


class Endpoints:
    """Answers the calls of endpoints.

    Attributes:
        endpoints: By name, with what is deployed to them and how their traffic is shared.
        serve: What a deployed model of an endpoint answers to instances, a list of JSON values.
        traffic: Each split of traffic that an endpoint has had, with the endpoint's name.
    """

    def __init__(self, models: Models, number: Callable[[], int]) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self.serve: Callable[[str, DeployedModel, list[Any]], list[Any]] = lambda *_: []
        self.traffic: list[tuple[str, dict[str, int]]] = []
        self._requests = itertools.count()
        self._models = models
        self._number = number

    def create_endpoint(self, request: endpoint_service.CreateEndpointRequest) -> operations_pb2.Operation:
        """Answers with an operation that is done: the launcher looks at one that is not after 20 s."""
        endpoint = request.endpoint
        if not 1 <= len(endpoint.display_name) <= 128:
            refuse("endpoint.display_name: must have 1 to 128 characters")
        endpoint_id = request.endpoint_id or self._number()
        endpoint.name = f"{location(request.parent)}/endpoints/{endpoint_id}"
        if endpoint.name in self.endpoints:
            raise ApiError(code_pb2.ALREADY_EXISTS, f"endpoint_id: {endpoint.name!r} already exists")
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
        if any(model.id == deployed.id for model in endpoint.deployed_models):
            raise ApiError(code_pb2.ALREADY_EXISTS, f"deployed_model.id: {deployed.id!r} already exists")
        deployed.id, deployed.create_time = deployed.id or str(self._number()), now()
        endpoint.deployed_models.append(deployed)
        if split:
            self._share(endpoint, {deployed.id if key == "0" else key: n for key, n in split.items()})
        response = endpoint_service.DeployModelResponse(deployed_model=deployed)
        name = f"{endpoint.name}/operations/{self._number()}"
        return done(name, endpoint_service.DeployModelResponse.pb(response))

    def undeploy_model(self, request: endpoint_service.UndeployModelRequest) -> operations_pb2.Operation:
        endpoint: Endpoint = find(self.endpoints, request.endpoint)
        rest = [model for model in endpoint.deployed_models if model.id != request.deployed_model_id]
        if len(rest) == len(endpoint.deployed_models):
            raise ApiError(code_pb2.NOT_FOUND, f"deployed_model_id: no {request.deployed_model_id!r}")
        split = dict(request.traffic_split) or dict(endpoint.traffic_split)
        if rest and split.get(request.deployed_model_id):
            raise ApiError(code_pb2.FAILED_PRECONDITION, f"{request.deployed_model_id} has traffic")
        endpoint.deployed_models = rest
        self._share(endpoint, split if rest else {})
        name, response = (
            f"{endpoint.name}/operations/{self._number()}",
            endpoint_service.UndeployModelResponse(),
        )
        return done(name, endpoint_service.UndeployModelResponse.pb(response))

    def update_endpoint(self, request: endpoint_service.UpdateEndpointRequest) -> Endpoint:
        endpoint: Endpoint = find(self.endpoints, request.endpoint.name)
        split = dict(request.endpoint.traffic_split)
        known = {model.id for model in endpoint.deployed_models}
        refuse(
            *(
                []
                if list(request.update_mask.paths) == ["traffic_split"]
                else ["update_mask: not in this fake"]
            ),
            *(f"traffic_split: no deployed model {model}" for model in sorted(set(split) - known)),
            *(["traffic_split: must add up to 100"] if split and sum(split.values()) != 100 else []),
        )
        self._share(endpoint, split)
        return endpoint

    def delete_endpoint(self, request: endpoint_service.DeleteEndpointRequest) -> operations_pb2.Operation:
        endpoint: Endpoint = find(self.endpoints, request.name)
        if endpoint.deployed_models:
            raise ApiError(code_pb2.FAILED_PRECONDITION, f"{request.name!r} has deployed models")
        del self.endpoints[endpoint.name]
        return done(f"{endpoint.name}/operations/{self._number()}")

    def predict(self, request: prediction_service.PredictRequest) -> prediction_service.PredictResponse:
        """Answers for one deployed model after the other, in proportion to their traffic."""
        endpoint: Endpoint = find(self.endpoints, request.endpoint)
        turns = [key for key, share in sorted(endpoint.traffic_split.items()) for _ in range(share)]
        if not turns:
            raise ApiError(code_pb2.FAILED_PRECONDITION, "the endpoint has no traffic_split")
        # 37 and 100 have no common divisor: each has its turns, and not all at once.
        chosen = turns[next(self._requests) * 37 % 100]
        (model,) = (model for model in endpoint.deployed_models if model.id == chosen)
        asked = json_format.MessageToDict(type(request).pb(request))["instances"]
        predictions = self.serve(endpoint.name, model, asked)
        response = prediction_service.PredictResponse(deployed_model_id=model.id, model=model.model)
        json_format.ParseDict({"predictions": predictions}, type(response).pb(response))
        return response

    def _share(self, endpoint: Endpoint, split: dict[str, int]) -> None:
        endpoint.traffic_split = split
        self.traffic.append((endpoint.name, split))

    def _model_is_there(self, name: str) -> None:
        if numbered(name).partition("@")[0] not in self._models.models:
            refuse(f"model: no model {name!r}")
