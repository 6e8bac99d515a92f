"""Whether a container image is where its name says."""

from __future__ import annotations

import re
from urllib.parse import quote

from shardline.pipelines.diagnosis import Diagnosis, error, ok, warning
from shardline.pipelines.vertex.rest import Rest

_IMAGE = re.compile(
    r"(?P<location>[a-z0-9-]+)-docker\.pkg\.dev/(?P<project>[^/]+)/(?P<repository>[^/]+)/"
    r"(?P<name>[^:@]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


def find_image(image: str, rest: Rest) -> Diagnosis:
    """Looks for an image in Artifact Registry.

    Args:
        image: As it stands in the settings.
        rest: A session.

    Raises:
        requests.HTTPError: When the registry refuses.
    """
    found = _IMAGE.fullmatch(image)
    if found is None:
        return warning(
            "image", f"{image} is not in Artifact Registry", "nobody can look from here whether it exists"
        )
    if not found["tag"] and not found["digest"]:
        return warning(
            "image", f"{image} has neither tag nor digest", "pin its digest: 'shardline image push'"
        )
    package = (
        f"v1/projects/{found['project']}/locations/{found['location']}/repositories/{found['repository']}"
        f"/packages/{quote(found['name'], safe='')}"
    )
    version = f"versions/{found['digest']}" if found["digest"] else f"tags/{found['tag']}"
    if rest.find("artifactregistry", f"{package}/{version}") is None:
        return error("image", f"{image} does not exist", "push it: 'shardline image push'")
    return ok("image", image)
