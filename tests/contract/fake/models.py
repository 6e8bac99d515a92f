"""The model registry."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from google.cloud.aiplatform_v1.types import Model, ModelEvaluation, model_service
from google.longrunning import operations_pb2
from google.rpc import code_pb2

from tests.contract.fake.api import ApiError, done, location, numbered, refuse
from tests.contract.fake.model_rules import model_faults

_SCHEMA = re.compile(r"gs://google-cloud-aiplatform/schema/modelevaluation/(\w+)_metrics_1\.0\.0\.yaml")

#: Fields of the schemas that are known here (ClassificationEvaluationMetrics, RegressionEvaluationMetrics).
_FIELDS = {
    "classification": {"auPrc", "auRoc", "logLoss", "confidenceMetrics", "confusionMatrix"},
    "regression": {
        "rootMeanSquaredError",
        "meanAbsoluteError",
        "meanAbsolutePercentageError",
        "rSquared",
        "rootMeanSquaredLogError",
    },
}


class Models:
    """Answers the calls of models and their evaluations.

    Attributes:
        models: Versions of each model by the model's name, as they were received.
        evaluations: Evaluations by name, which is that of the model's version and theirs, as received.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self.models: dict[str, list[Model]] = {}
        self.evaluations: dict[str, ModelEvaluation] = {}
        self._number = number

    def upload_model(self, request: model_service.UploadModelRequest) -> operations_pb2.Operation:
        """Answers with an operation that is done: the launcher looks at one that is not after 20 s."""
        parent = location(request.parent)
        refuse(*model_faults(Model.pb(request.model)))
        name = numbered(request.parent_model) or f"{parent}/models/{self._number()}"
        if request.parent_model and name not in self.models:
            raise ApiError(code_pb2.NOT_FOUND, f"parent_model: no model {request.parent_model!r}")
        versions = self.models.setdefault(name, [])
        versions.append(request.model)
        response = model_service.UploadModelResponse(model=name, model_version_id=str(len(versions)))
        return done(f"{name}/operations/{self._number()}", model_service.UploadModelResponse.pb(response))

    def list_model_evaluations(
        self, request: model_service.ListModelEvaluationsRequest
    ) -> model_service.ListModelEvaluationsResponse:
        prefix = f"{request.parent}/evaluations/"
        found = [item for name, item in self.evaluations.items() if name.startswith(prefix)]
        return model_service.ListModelEvaluationsResponse(model_evaluations=found)

    def import_model_evaluation(self, request: model_service.ImportModelEvaluationRequest) -> ModelEvaluation:
        model, _, version = request.parent.partition("@")
        if not 1 <= int(version or 0) <= len(self.models.get(model, ())):
            raise ApiError(code_pb2.NOT_FOUND, f"parent: no model {request.parent!r}")
        evaluation = request.model_evaluation
        refuse(*_metrics_faults(evaluation))
        evaluation.name = f"{request.parent}/evaluations/{self._number()}"
        self.evaluations[evaluation.name] = evaluation
        return evaluation


def _metrics_faults(evaluation: ModelEvaluation) -> Iterator[str]:
    """Yields what is wrong with the metrics of an evaluation by the schema that it names."""
    schema = _SCHEMA.fullmatch(evaluation.metrics_schema_uri)
    if not schema or schema[1] not in _FIELDS:
        yield "metrics_schema_uri: no such schema"
        return
    for name, value in dict(evaluation.metrics or {}).items():
        if name not in _FIELDS[schema[1]]:
            yield f"metrics: the schema {schema[1]} has no field {name!r}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"metrics: {name} is {value}"
