"""The model registry.

Sources: the comments in google/cloud/aiplatform/v1/model.proto and model_service.proto, and
https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.cloud.aiplatform_v1.types import Model, model_service
from google.longrunning import operations_pb2
from google.rpc import code_pb2

from tests.contract.fake.api import ApiError, done, location, numbered, refuse
from tests.contract.fake.rules import label_faults


class Models:
    """Answers the upload; `models` has the versions of each model by its name, as they were received."""

    def __init__(self, number: Callable[[], int]) -> None:
        self.models: dict[str, list[Model]] = {}
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


def _faults(model: Any) -> Iterator[str]:
    """Yields what is wrong with a Model (protobuf), each fault beginning with the field's name."""
    yield from label_faults(model.labels)
    if not model.artifact_uri.startswith("gs://"):
        yield f"artifact_uri: must be gs://, got {model.artifact_uri!r}"
    container = model.container_spec
    if not container.image_uri or not container.predict_route.startswith("/"):
        yield "container_spec: image_uri and routes that begin with '/' are required"
