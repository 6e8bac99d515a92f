"""Servers of a model: a REST predict endpoint, or an endpoint of the platform, asked for predictions."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from shardline.components.vertex.client import Platform, ask
from shardline.trainer.errors import PlatformError, RunError, SettingsError

#: Seconds that one answer may take.
TIMEOUT_S = 30.0

_LARGEST_ANSWER = 64 << 20
_SHOWN = 200
#: The chance that a model with its share of the traffic has not been asked although it answers.
_MISSED = 1e-9
#: A new split of the traffic may take a while to reach all who direct it.
_FEWEST_ATTEMPTS = 100
#: Seconds between two attempts.
_PAUSE_S = 0.1


@dataclass(frozen=True)
class Answer:
    """Predictions for some instances.

    Attributes:
        predictions: What the server has sent, a list of objects if all is well.
        seconds: Time from the request to the answer.
        model: Id of the deployed model that gave them; "" where the server does not say.
    """

    predictions: Any
    seconds: float
    model: str = ""


#: Sends instances, in the form of TensorFlow Serving's REST interface.
Server = Callable[[Sequence[Any]], Answer]


def rest_server(url: str, *, timeout_s: float = TIMEOUT_S) -> Server:
    """Returns the server of a REST predict endpoint, http(s)://HOST/v1/models/NAME[:predict].

    It is sent no credentials, whatever this machine has for its host, and is not followed elsewhere.

    Raises:
        SettingsError: When the address is no such endpoint.
    """
    import requests
    from urllib3.exceptions import LocationValueError

    address = predict_address(url)
    session = requests.Session()
    session.auth = _no_credentials
    # Where to would be parsed even if it is not followed, and an answer that fails there is never closed.
    session.resolve_redirects = lambda *_, **__: iter(())

    def server(instances: Sequence[Any]) -> Answer:
        began = time.perf_counter()
        try:
            content = {"instances": list(instances)}
            status, answer = _in_time(lambda: _post(session, address, content, timeout_s), timeout_s)
        except requests.Timeout:
            raise PlatformError(
                f"{address} gave no answer for {timeout_s:g} s; is the model loaded?"
            ) from None
        except (requests.exceptions.InvalidURL, LocationValueError):
            raise SettingsError(f"{address!r} names no host; write http://HOST:8501/v1/models/NAME") from None
        except requests.RequestException as error:
            raise PlatformError(
                f"{address} is not reached ({type(error).__name__}); is the server running?"
            ) from None
        return Answer(_predictions(address, status, answer), time.perf_counter() - began)

    return server


def predict_address(url: str) -> str:
    """Returns the address to which instances are posted; raises SettingsError when `url` is none."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # raises for a..b and for labels that are too long
    except ValueError:
        known, parts = False, urlsplit("")
    if parts.username or parts.password:
        raise SettingsError("the address must hold no user or password: a server is sent no credentials")
    if not known or "/models/" not in parts.path or parts.query or parts.fragment:
        raise SettingsError(
            f"{url!r} is no REST predict endpoint; write http://HOST:8501/v1/models/NAME, or the resource "
            "name of an endpoint, projects/P/locations/L/endpoints/ID"
        )
    return url if url.endswith(":predict") else f"{url.rstrip('/')}:predict"


def endpoint_server(
    name: str, *, model: str = "", api_endpoint: str = "", timeout_s: float = TIMEOUT_S
) -> Server:
    """Returns the server behind an endpoint of the platform.

    Requests go to an endpoint as a whole; its traffic decides which deployed model answers, and no request
    can ask for another. Where `model`, the id of a deployed model, is given, each request is repeated until
    that one has answered, which a model without traffic never does; the others may take other inputs.

    Source: googleapis/python-aiplatform#827; PredictRequest has no deployed_model_id, PredictResponse has.

    Raises:
        PlatformError: When the endpoint is not there.
        SettingsError: When nothing is deployed to it, or the model there has no traffic.
    """
    from google.api_core.exceptions import BadRequest

    platform = Platform.of(name, endpoint=api_endpoint)
    found = ask(f"read the endpoint {name}", platform.endpoints.get_endpoint, {"name": name})
    shares = {deployed.id: found.traffic_split.get(deployed.id, 0) for deployed in found.deployed_models}
    if not any(shares.values()):
        raise SettingsError(f"no deployed model of {name} has traffic: there is nobody to ask")
    if model and not shares.get(model):
        some = ", ".join(f"{key} ({share} %)" for key, share in sorted(shares.items()) if share)
        raise SettingsError(
            f"the deployed model {model!r} of {name} has no traffic, by which alone requests go; those with "
            f"some are {some}"
        )
    # Source: Endpoint.dedicated_endpoint_dns; the shared host does not serve such an endpoint.
    if found.dedicated_endpoint_enabled:
        platform = replace(platform, endpoint=found.dedicated_endpoint_dns)
    attempts = max(_FEWEST_ATTEMPTS, _attempts(shares[model] / 100)) if model else 1

    def server(instances: Sequence[Any]) -> Answer:
        refused = ""
        for attempt in range(attempts):
            time.sleep(_PAUSE_S if attempt else 0)
            try:
                answer = _predict(platform, name, instances, timeout_s)
            except PlatformError as error:
                if not model or not isinstance(error.__cause__, BadRequest):
                    raise
                refused = f"; the last that was refused: {error}"
                continue
            if model in ("", answer.model):
                return answer
        words = f"the deployed model {model} of {name} answered none of {attempts:,} requests"
        raise RunError(f"{words}{refused}")

    return server


def _predict(platform: Platform, name: str, instances: Sequence[Any], timeout_s: float) -> Answer:
    from google.cloud.aiplatform_v1.types import PredictRequest
    from google.protobuf import json_format

    began, doing = time.perf_counter(), f"ask {name}"
    request = PredictRequest(endpoint=name)
    json_format.ParseDict({"instances": list(instances)}, PredictRequest.pb(request))
    response = ask(doing, platform.predictions.predict, request, attempt_s=timeout_s)
    content = type(response).pb(response)
    predictions = [_plain(value) for value in content.predictions]
    return Answer(predictions, time.perf_counter() - began, content.deployed_model_id)


def _attempts(share: float) -> int:
    """Returns after how many requests a model with a share of the traffic has answered one."""
    return math.ceil(math.log(_MISSED) / math.log(1 - share)) if share < 1 else 1


def _plain(value: Any) -> Any:
    """Returns a protobuf Value as a plain one; its own conversion refuses numbers that are not finite."""
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_plain(item) for item in value.list_value.values]
    if kind == "struct_value":
        return {name: _plain(item) for name, item in value.struct_value.fields.items()}
    return None if kind in (None, "null_value") else getattr(value, kind)


def _post(session: Any, address: str, content: Any, timeout_s: float) -> tuple[int, bytes]:
    """Posts JSON and returns the answer; raises what requests raises, Timeout also for a slow answer."""
    import requests
    from urllib3.exceptions import HTTPError, TimeoutError

    end, content_read = time.monotonic() + timeout_s, bytearray()
    with session.post(
        address, json=content, timeout=timeout_s, allow_redirects=False, stream=True
    ) as response:
        if response.is_redirect:
            target = response.headers.get("Location", "")[:_SHOWN]
            raise PlatformError(f"{address} redirects to {target!r}, and is not followed; probe that address")
        try:
            while chunk := response.raw.read1(1 << 16, decode_content=True):
                content_read += chunk
                if time.monotonic() > end or len(content_read) > _LARGEST_ANSWER:
                    raise requests.Timeout
        except HTTPError as error:  # what is read past requests is not in its own words
            late = isinstance(error, TimeoutError)
            raise (requests.Timeout if late else requests.ConnectionError)(error) from error
        return response.status_code, bytes(content_read)


def _in_time(work: Callable[[], tuple[int, bytes]], limit_s: float) -> tuple[int, bytes]:
    """Returns what a call returns; raises Timeout after the limit, whatever the server goes on sending.

    Timeouts of a connection begin anew with each byte, and no deadline holds before the answer's own status.
    """
    import requests

    done: queue.SimpleQueue[tuple[int, bytes] | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        except Exception as error:
            done.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        found = done.get(timeout=limit_s)
    except queue.Empty:
        raise requests.Timeout from None
    if isinstance(found, Exception):
        raise found
    return found


def _predictions(address: str, status: int, content: bytes) -> Any:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    said = answer.get("error") if isinstance(answer, dict) else None
    if status != 200:
        reason = f": {' '.join(str(said).split())[:_SHOWN]}" if said else ""
        # A server that cannot take the examples serves another model.
        kind = RunError if status == 400 else PlatformError
        raise kind(f"{address} refuses the golden examples (status {status}){reason}")
    if not isinstance(answer, dict) or "predictions" not in answer:
        raise PlatformError(f"{address} answers with no predictions: {ascii(content[:40])[1:]}")
    return answer["predictions"]


def _no_credentials(request: Any) -> Any:
    # Without it requests takes a password for the host from ~/.netrc.
    return request
