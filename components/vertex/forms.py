"""Formats of texts that settings and requests have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Form(NamedTuple):
    """Format of a text: a regular expression for the whole text, and a description for messages."""

    pattern: str
    description: str

    def fits(self, text: str) -> bool:
        """Whether a text has the format."""
        return re.fullmatch(self.pattern, text) is not None


MODEL = Form(
    r"projects/[\w:.-]+/locations/([a-z0-9-]+)/models/[\w-]+",
    "projects/P/locations/L/models/ID, without a version",
)
ENDPOINT = Form(MODEL.pattern.replace("models", "endpoints"), "projects/P/locations/L/endpoints/ID")
SECRET = Form(
    r"projects/[^/]+/secrets/[\w-]+/versions/(\d+|latest|[A-Za-z][\w-]*)",
    "projects/PROJECT/secrets/NAME/versions/latest, the name of a secret in Secret Manager",
)
#: google_cloud_pipeline_components, CustomTrainingJobOp: "A duration in seconds with up to nine fractional
#: digits, terminated by 's'".
DURATION = Form(r"\d+(\.\d{1,9})?s", "seconds and an 's', as in '3600s'")
#: docs.cloud.google.com, resource-manager/docs/labels-overview: letters of all alphabets.
_LABEL = re.compile(r"[^\W\d_][\w-]{0,62}=[\w-]{0,63}")


def wrong_label(labels: Mapping[str, Any]) -> str:
    """Returns the first label that the API does not take, KEY=VALUE; "" if it takes all."""
    texts = [f"{key}={value}" for key, value in labels.items() if "{{$" not in str(value)]
    return next((text for text in texts if text != text.lower() or not _LABEL.fullmatch(text)), "")


def seconds(duration: str) -> float | None:
    """Returns the seconds of a duration as the API writes it, "3600s"; None for any other text."""
    return float(duration[:-1]) if DURATION.fits(duration) else None
