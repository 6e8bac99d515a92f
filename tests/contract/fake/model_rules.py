"""What the documentation says of a Model, as the API would check it when one is uploaded.

Sources: the comments in google/cloud/aiplatform/v1/model.proto and model_service.proto, and
https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any


def model_faults(model: Any) -> Iterator[str]:
    """Yields what is wrong with a Model (protobuf), each fault beginning with the field's name."""
    if not 1 <= len(model.display_name) <= 128:
        yield "display_name: must have 1 to 128 characters"
    for key, value in model.labels.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", key) or not re.fullmatch(r"[a-z0-9_-]{0,64}", value):
            yield f"labels: invalid label {key!r}: {value!r}"
    if not model.artifact_uri.startswith("gs://"):
        yield f"artifact_uri: must be gs://, got {model.artifact_uri!r}"
    container = model.container_spec
    if not container.image_uri:
        yield "container_spec.image_uri: is required"
    for name in ("predict_route", "health_route"):
        if not getattr(container, name).startswith("/"):
            yield f"container_spec.{name}: must begin with '/'"
