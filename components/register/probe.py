"""Probe: sends the golden examples of an export to a server, and compares the predictions.

A server is a REST predict endpoint of TensorFlow Serving, or an endpoint of the platform.
"""

from __future__ import annotations

import json
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.model_store import Export
from shardline.components.validate.export.predictions import compare, is_answer
from shardline.components.vertex.client import Platform, call_api
from shardline.trainer.base.errors import ModelError, PlatformError, RunError, SettingsError
from shardline.trainer.base.progress import report

#: Another machine rounds differently, in 16 bits by a percent.
TOLERANCE = 0.01
#: Seconds that one answer may take.
TIMEOUT_S = 30.0

# The platform takes 1.5 MB a request.
_LARGEST_REQUEST, _LARGEST_ANSWER = 1_000_000, 64 << 20
_ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d+)?/([^\s?#@]*/)?models/[^\s?#@]+")


#: Sends instances, in the form of TensorFlow Serving's REST interface, and returns the predictions, a list of
#: objects if the server is right, and the id of the deployed model, "" where the server does not name it.
Server = Callable[[Sequence[Any]], tuple[Any, str]]


@dataclass(frozen=True)
class Probe:
    """Outcome of a probe.

    Attributes:
        difference: Largest difference of an answer from a golden one, as in `Comparison`.
        words: What differs most; "" where nothing does.
        examples: Number of golden examples that were sent.
        tolerance: Largest difference with which they agree.
        models: Ids of the deployed models that answered; empty where the server does not name them.
    """

    difference: float
    words: str
    examples: int
    tolerance: float
    models: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the server gives the golden answers."""
        return self.difference <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Returns what --json prints."""
        return {"agrees": self.agrees, **asdict(self)}

    def __str__(self) -> str:
        largest = f"largest difference {self.difference:.2g} on {self.examples} golden examples"
        detail = "" if self.agrees or not self.words else f": {self.words}"
        return f"{largest} (tolerance {self.tolerance:g}){detail}"


def probe(server: Server, exported: Path, *, tolerance: float = TOLERANCE) -> Probe:
    """Sends the golden examples to a server, and compares the predictions.

    Raises:
        ModelError: When the export has no golden examples.
        PlatformError: When the server fails or is not reached.
        SettingsError: When `tolerance` is no number from 0 to 1.
    """
    if not 0 <= tolerance <= 1:
        raise SettingsError(f"the tolerance must be from 0 to 1, got {tolerance}; 0.01 is a percent")
    export, instances = _read_golden(exported)
    report("probe", f"sending {len(instances)} golden examples")
    # One by one only where they are too large for one request.
    fits = len(json.dumps(instances)) <= _LARGEST_REQUEST
    requests = [instances] if fits else [[instance] for instance in instances]
    answers = [server(request) for request in requests]
    agreement = compare(export, [row for rows, _ in answers if isinstance(rows, list) for row in rows])
    return Probe(
        difference=agreement.difference,
        words=agreement.description,
        examples=len(instances),
        tolerance=tolerance,
        models=tuple(sorted({model for _, model in answers} - {""})),
    )


def _read_golden(exported: Path) -> tuple[Export, list[Any]]:
    """Returns an export and its golden instances, without those with a number that JSON does not have."""
    export, path = Export.read(exported), exported / model_store.EXPORT_FILE
    golden, remedy = export.golden or {}, "validate the model again"
    instances, predictions = golden.get("instances"), golden.get("predictions")
    if not instances or not predictions:
        raise ModelError(f"{path} has no golden examples; {remedy}")
    both = (
        isinstance(instances, list) and isinstance(predictions, list) and len(instances) == len(predictions)
    )
    if not both or not all(is_answer(row, export) for row in predictions):
        raise ModelError(f"the golden examples in {path} are damaged; {remedy}")
    pairs = [pair for pair in zip(instances, predictions, strict=True) if not _contains_none(pair[0])]
    if not pairs:
        raise ModelError(f"no golden example in {path} has finite numbers only, and JSON has no others")
    sent, expected = zip(*pairs, strict=True)
    return replace(export, golden={"predictions": list(expected)}), list(sent)


def _contains_none(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_contains_none, value.values()))
    return value is None or (isinstance(value, list) and any(map(_contains_none, value)))


def rest_server(url: str, *, timeout_s: float = TIMEOUT_S) -> Server:
    """Returns the server of a REST predict endpoint, http(s)://HOST/v1/models/NAME[:predict].

    It is sent no credentials, not even those that this machine has for its host, and redirects are refused.

    Raises:
        SettingsError: When the address is no such endpoint.
    """
    from urllib3 import PoolManager, Timeout
    from urllib3.exceptions import HTTPError, LocationParseError, ReadTimeoutError

    if not _ADDRESS.fullmatch(url):
        raise SettingsError(
            "URL is no REST predict endpoint; write http://HOST:8501/v1/models/NAME, without a password, "
            "or the name of an endpoint, projects/P/locations/L/endpoints/ID"
        )
    address = url if url.endswith(":predict") else f"{url.rstrip('/')}:predict"
    pool = PoolManager(timeout=Timeout(timeout_s), retries=False)

    def server(instances: Sequence[Any]) -> tuple[Any, str]:
        # A thread, because urllib3's timeout restarts with each byte that it receives.
        done: queue.SimpleQueue[tuple[int, bytes] | Exception] = queue.SimpleQueue()

        def post() -> None:
            body = {"instances": list(instances)}
            try:
                answer = pool.request("POST", address, json=body, redirect=False, preload_content=False)
                with answer:
                    done.put((answer.status, answer.read(_LARGEST_ANSWER, decode_content=True)))
            except Exception as error:
                done.put(error)

        threading.Thread(target=post, daemon=True).start()
        try:
            result = done.get(timeout=timeout_s)
            if isinstance(result, Exception):
                raise result
        except (ReadTimeoutError, queue.Empty):
            raise PlatformError(
                f"{address} gave no answer for {timeout_s:g} s; is the model loaded?"
            ) from None
        except LocationParseError:
            raise SettingsError(f"{address!r} names no host; write http://HOST:8501/v1/models/NAME") from None
        except HTTPError as error:
            raise PlatformError(
                f"{address} cannot be reached ({type(error).__name__}); is the server running?"
            ) from None
        return _predictions(address, *result), ""

    return server


def _predictions(address: str, status: int, content: bytes) -> Any:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if status != 200:
        cause = answer.get("error") if isinstance(answer, dict) else None
        reason = f": {' '.join(str(cause).split())[:200]}" if cause else ""
        # A server that rejects the examples serves another model.
        kind = RunError if status == 400 else PlatformError
        raise kind(f"{address} refuses the golden examples (status {status}){reason}")
    if not isinstance(answer, dict) or "predictions" not in answer:
        raise PlatformError(f"{address} answers with no predictions: {ascii(content[:40])[1:]}")
    return answer["predictions"]


def endpoint_server(name: str, *, api_endpoint: str = "", timeout_s: float = TIMEOUT_S) -> Server:
    """Returns the server of an endpoint of the platform.

    The endpoint's traffic split decides which deployed model answers; a request cannot name one.

    Source: googleapis/python-aiplatform#827; PredictRequest has no deployed_model_id, PredictResponse has.

    Raises:
        PlatformError: When the endpoint does not exist.
        SettingsError: When no model that is deployed to it has traffic.
    """
    platform = Platform.of_resource(name, endpoint=api_endpoint)
    endpoint = call_api(f"read the endpoint {name}", platform.endpoints.get_endpoint, {"name": name})
    if not any(endpoint.traffic_split.get(deployed.id) for deployed in endpoint.deployed_models):
        raise SettingsError(f"no deployed model of {name} has traffic, so none can answer requests")
    # Source: Endpoint.dedicated_endpoint_dns; the shared host does not serve such an endpoint.
    if endpoint.dedicated_endpoint_enabled:
        platform = replace(platform, endpoint=endpoint.dedicated_endpoint_dns)

    def server(instances: Sequence[Any]) -> tuple[Any, str]:
        from google.cloud.aiplatform_v1.types import PredictRequest
        from google.protobuf import json_format

        request = PredictRequest(endpoint=name)
        json_format.ParseDict({"instances": list(instances)}, PredictRequest.pb(request))
        response = call_api(f"ask {name}", platform.predictions.predict, request, timeout_s=timeout_s)
        content = type(response).pb(response)
        return [_to_python(value) for value in content.predictions], content.deployed_model_id

    return server


def _to_python(value: Any) -> Any:
    """Returns a protobuf Value as a Python value; protobuf's conversion refuses non-finite numbers."""
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_to_python(item) for item in value.list_value.values]
    if kind == "struct_value":
        return {name: _to_python(item) for name, item in value.struct_value.fields.items()}
    return None if kind in (None, "null_value") else getattr(value, kind)
