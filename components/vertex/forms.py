"""Formats of texts that settings and requests have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from shardline.trainer.base.deserialize import Rule


class Form(NamedTuple):
    """Format of a text: a regular expression for the whole text, and a description for messages."""

    pattern: str
    description: str

    def fits(self, text: str) -> bool:
        """Whether a text has the format."""
        return re.fullmatch(self.pattern, text) is not None

    def allows(self, text: str) -> bool:
        """Whether a setting may have this text: "" and placeholders, too."""
        return not text or "{{$" in text or self.fits(text)


MODEL = Form(
    r"projects/[\w:.-]+/locations/([a-z0-9-]+)/models/[\w-]+",
    "projects/P/locations/L/models/ID, without a version",
)
ENDPOINT = Form(MODEL.pattern.replace("models", "endpoints"), "projects/P/locations/L/endpoints/ID")
TENSORBOARD = Form(MODEL.pattern.replace("models", "tensorboards"), "projects/P/locations/L/tensorboards/ID")
SECRET = Form(
    r"projects/[^/]+/secrets/[\w-]+/versions/(\d+|latest|[A-Za-z][\w-]*)",
    "projects/PROJECT/secrets/NAME/versions/latest, the name of a secret in Secret Manager",
)
_PART = "[a-z0-9]+([._-]+[a-z0-9]+)*"
#: distribution/reference; gcr.io has projects DOMAIN:PROJECT.
IMAGE = Form(
    rf"([\w.-]+(:\d+)?/)?([a-z0-9.-]+:[a-z0-9-]+/)?({_PART}/)*{_PART}(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?",
    "REGISTRY/PATH:TAG or REGISTRY/PATH@sha256:DIGEST",
)
NETWORK = Form(r"projects/[\w:.-]+/global/networks/[\w-]+", "projects/NUMBER/global/networks/NAME")
KEY = Form(
    r"projects/[\w:.-]+/locations/[a-z0-9-]+/keyRings/[\w-]+/cryptoKeys/[\w-]+",
    "projects/P/locations/L/keyRings/RING/cryptoKeys/KEY",
)
REGION = Form(r"[a-z]+-[a-z]+\d+", "a region such as europe-west4")
BUCKET_PATH = Form("gs://[^/]+(/.*)?", "gs://BUCKET/PATH")
DISPLAY_NAME = Form(r"[^\n]{1,128}", "a text of 1 to 128 characters")
#: google_cloud_pipeline_components, CustomTrainingJobOp: "A duration in seconds with up to nine fractional
#: digits, terminated by 's'".
DURATION = Form(r"\d+(\.\d{1,9})?s", "seconds and an 's', as in '3600s'")
#: docs.cloud.google.com, resource-manager/docs/labels-overview: letters of all alphabets.
_LABEL = re.compile(r"[^\W\d_][\w-]{0,62}=[\w-]{0,63}")


def wrong_label(labels: Mapping[str, Any]) -> str:
    """Returns the first label that the API does not take, KEY=VALUE; "" if it takes all."""
    texts = [f"{key}={value}" for key, value in labels.items() if "{{$" not in str(value)]
    return next((text for text in texts if text != text.lower() or not _LABEL.fullmatch(text)), "")


_TAGS = "names and values of lower-case letters, digits, _ and -, 63 at most"
#: Labels of the API, which the settings call tags.
Tags = Annotated[Mapping[str, str], Rule(_TAGS, lambda labels: not wrong_label(labels))]


def other_region(name: str, region: str) -> str:
    """Returns the region in a resource's name, or of the zone in it, unless it is `region`; else ""."""
    found = re.search(r"/(locations|regions|zones)/([^/]+)/", name)
    place = re.sub("-[a-z]$", "", found[2]) if found else region
    return "" if place == region else place


def seconds(duration: str) -> float | None:
    """Returns the seconds of a duration as the API writes it, "3600s"; None for any other text."""
    return float(duration[:-1]) if DURATION.fits(duration) else None
