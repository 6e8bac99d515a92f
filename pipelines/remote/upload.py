"""KFP repository in Artifact Registry: compiled pipelines, versioned by content, and their tags."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.components.vertex.client import platform_errors, retry_policy
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.trainer.base.errors import PipelineError, PlatformError, SettingsError

_URL = re.compile(
    r"(?P<host>https://[a-z0-9-]+-kfp\.pkg\.dev/[^/]+/[^/]+)/(?P<package>[^/]+)"
    r"/(?P<version>sha256:[0-9a-f]{64}|[\w.-]+)"
)
#: Artifact Registry's format; kfp does not check tags.
_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Uploaded:
    """A version, sha256:..., of a pipeline in the registry.

    Attributes:
        is_new: Whether the version was not there before.
        moved: Previous version of each tag that was moved; "" for a new tag.
    """

    registry: str
    package: str
    version: str
    is_new: bool
    moved: dict[str, str]

    @property
    def url(self) -> str:
        """URL of exactly this version, for `submit` and schedules."""
        return f"{self.registry}/{self.package}/{self.version}"


def upload(registry: str, package: str, file: Path, tags: Sequence[str]) -> Uploaded:
    """Uploads a compiled pipeline, unless the registry has it already, and moves the tags to it.

    A tag is moved atomically, after the upload of the new version: readers get the old version or the new
    one. Repeated, it does what is left. `registry` is https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY,
    `package` the pipeline's name there. Raises SettingsError for a malformed tag, before any call, and
    PlatformError when the registry refuses or is not reached.
    """
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise SettingsError(
                "a tag must have lower-case letters, digits, ., _ and -, and begin with a letter or digit, "
                f"got {tag!r}"
            )
    client, version = _client(registry), _digest(file.read_bytes())
    is_new = not _find(client, f"look for {package}", client.get_version, package, version)
    if is_new:
        package, version = _call(client, f"upload {package}", client.upload_pipeline, str(file))
    moved = {}
    for tag in dict.fromkeys(tags):
        before = _tagged(client, package, tag)
        if before != version:
            _set_tag(client, package, version, tag, is_there=bool(before))
            moved[tag] = before
    return Uploaded(registry, package, version, is_new, moved)


def download(url: str) -> tuple[bytes, str]:
    """Returns a pipeline's YAML from the registry, and the URL of exactly that version.

    Raises PipelineError for a malformed URL, PlatformError when the version cannot be read, or is another.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise PipelineError(
            f"{url!r} is not the URL of a pipeline in a registry; the format is "
            "https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY/PACKAGE/TAG, or .../sha256:DIGEST"
        )
    client, package, version = _client(match["host"]), match["package"], match["version"]
    if not version.startswith("sha256:"):
        tag, version = version, _tagged(client, package, version)
        if not version:
            raise PipelineError(f"{match['host']} has no {package} with the tag {tag!r}")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pipeline.yaml"
        call = client.download_pipeline
        _call(client, f"download {url}", call, package, version=version, file_name=str(path))
        content = path.read_bytes()
    if (digest := _digest(content)) != version:
        raise PlatformError(f"{url} has the digest {digest}: it was damaged or replaced; upload it again")
    return content, f"{match['host']}/{package}/{version}"


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _client(host: str) -> Any:
    from kfp.registry import RegistryClient

    with platform_errors("sign in to Google Cloud"):
        return RegistryClient(host)


def _tagged(client: Any, package: str, tag: str) -> str:
    """Returns the version that a tag points at; "" where there is no such tag."""
    reference = _find(client, f"read the tag {tag}", client.get_tag, package, tag)
    return str(reference["version"]).rpartition("/")[2] if reference else ""


def _set_tag(client: Any, package: str, version: str, tag: str, *, is_there: bool) -> None:
    change = client.update_tag if is_there else client.create_tag
    try:
        _call(client, f"set the tag {tag}", change, package, version, tag)
    except PlatformError as error:
        # After an attempt whose response was lost, the next one finds the tag.
        is_conflict = refusal_kind(error.__cause__) is RefusalKind.CONFLICT
        if not is_conflict or _tagged(client, package, tag) != version:
            raise


def _find(client: Any, action: str, call: Callable[..., Any], *args: str) -> Any:
    """Returns the result of a call; None for status 404."""
    try:
        return _call(client, action, call, *args)
    except PlatformError as error:
        if refusal_kind(error.__cause__) is RefusalKind.MISSING:
            return None
        raise


def _call(client: Any, action: str, call: Callable[..., Any], *args: str, **options: str) -> Any:
    # Versions are digests of the content: an upload can be repeated.
    with platform_errors(action):
        return retry_policy(action, client._auth)(call)(*args, **options)
