"""The model registry, and endpoints.

Sources: the comments in google/cloud/aiplatform/v1/model.proto and model_service.proto, and
https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.cloud.aiplatform_v1.types import Endpoint, Model, endpoint_service, model_service
from google.longrunning import operations_pb2
from google.rpc import code_pb2

from tests.contract.fake.api import ApiError, done, find, location, numbered, refuse
from tests.contract.fake.rules import label_faults


class Models:
    """Answers the upload; `models` has the versions of each model by its name, as they were received.

    The first version is the default; `endpoints` has those that a test has made, by name.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self.models: dict[str, list[Model]] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self._number = number

    def upload_model(self, request: model_service.UploadModelRequest) -> operations_pb2.Operation:
        """Answers with an operation that is done: the launcher looks at one that is not after 20 s."""
        parent = location(request.parent)
        refuse(*_faults(Model.pb(request.model)))
        name = numbered(request.parent_model) or f"{parent}/models/{self._number()}"
        if request.parent_model and name not in self.models:
            raise ApiError(code_pb2.NOT_FOUND, f"parent_model: no model {request.parent_model!r}")
        versions = self.models.setdefault(name, [])
        versions.append(request.model)
        response = model_service.UploadModelResponse(model=name, model_version_id=str(len(versions)))
        return done(f"{name}/operations/{self._number()}", model_service.UploadModelResponse.pb(response))

    def get_model(self, request: model_service.GetModelRequest) -> Model:
        name, _, version = request.name.partition("@")
        versions = dict(enumerate(find(self.models, name), start=1))
        return find({f"{name}@{key}": model for key, model in versions.items()}, f"{name}@{version or 1}")

    def get_endpoint(self, request: endpoint_service.GetEndpointRequest) -> Endpoint:
        return find(self.endpoints, request.name)


def _faults(model: Any) -> Iterator[str]:
    """Yields what is wrong with a Model (protobuf), each fault beginning with the field's name."""
    yield from label_faults(model.labels)
    if not model.artifact_uri.startswith("gs://"):
        yield f"artifact_uri: must be gs://, got {model.artifact_uri!r}"
    container = model.container_spec
    if not container.image_uri or not container.predict_route.startswith("/"):
        yield "container_spec: image_uri and routes that begin with '/' are required"
