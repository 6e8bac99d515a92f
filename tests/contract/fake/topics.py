"""Topics of Pub/Sub. Source: the discovery document of pubsub v1 (projects.topics.publish, PubsubMessage)."""

from __future__ import annotations

import base64
import json
from typing import Any

from google.rpc import code_pb2

from tests.contract.fake.api import ApiError, refuse
from tests.contract.fake.web import WebRequest, route

TOPIC_ROUTES = (
    route("Publish", "POST", r"pubsub\.googleapis\.com", "/v1/projects/{project}/topics/{topic}:publish"),
)
_INPUT = {"data", "attributes", "orderingKey"}


class Topics:
    """Answers what clients publish.

    Attributes:
        topics: Messages of each topic by its name, data and attributes.
    """

    def __init__(self) -> None:
        self.topics: dict[str, list[tuple[bytes, dict[str, str]]]] = {}

    def publish(self, request: WebRequest) -> dict[str, Any]:
        name = "projects/{project}/topics/{topic}".format(**request.fields)
        if name not in self.topics:
            raise ApiError(code_pb2.NOT_FOUND, f"Resource not found (resource={name.rpartition('/')[2]}).")
        body = json.loads(request.body)
        for message in body["messages"]:
            refuse(*(f"Unknown name {key!r}" for key in message if key not in _INPUT))
            attributes = message.get("attributes", {})
            refuse(*(f"attribute {key} is no text" for key in attributes if type(attributes[key]) is not str))
            self.topics[name].append((base64.b64decode(message["data"], validate=True), attributes))
        return {"messageIds": [str(number) for number in range(len(body["messages"]))]}
