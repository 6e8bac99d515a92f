"""KFP repository in Artifact Registry: compiled pipelines, versioned by content, and their tags."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardline.components.vertex import RefusalKind, platform_errors, refusal_kind, retry_policy
from shardline.trainer.base.errors import PipelineError, PlatformError, SettingsError

_URL = re.compile(
    r"(?P<host>https://[a-z0-9-]+-kfp\.pkg\.dev/[^/]+/[^/]+)/(?P<package>[^/]+)"
    r"/(?P<version>sha256:[0-9a-f]{64}|[\w.-]+)"
)
#: Artifact Registry's format; kfp does not check tags.
_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")


def upload(registry: str, package: str, file: Path, tags: Sequence[str]) -> tuple[str, bool]:
    """Uploads a compiled pipeline, unless the registry has it already, and moves the tags to it.

    A tag is moved atomically, after the upload of the new version: readers get the old version or the new
    one. Repeated, it does what is left. `registry` is https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY,
    `package` the pipeline's name there. Returns the version, sha256:..., and whether it is new. Raises
    SettingsError for a malformed tag, before any call, and PlatformError when the registry refuses or is not
    reached.
    """
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise SettingsError(
                "a tag must have lower-case letters, digits, ., _ and -, and begin with a letter or digit, "
                f"got {tag!r}"
            )
    client, version, missing = _client(registry), _digest(file.read_bytes()), RefusalKind.MISSING
    is_new = not _call(client, f"look for {package}", client.get_version, package, version, unless=missing)
    if is_new:
        package, version = _call(client, f"upload {package}", client.upload_pipeline, str(file))
    for tag in dict.fromkeys(tags):
        action, reference = f"set the tag {tag}", (package, version, tag)
        if not _call(client, action, client.update_tag, *reference, unless=missing):
            # After an attempt whose response was lost, the next one finds the tag.
            _call(client, action, client.create_tag, *reference, unless=RefusalKind.CONFLICT)
    return version, is_new


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
        tag, call = version, client.get_tag
        found = _call(client, f"read the tag {tag}", call, package, tag, unless=RefusalKind.MISSING)
        if not found:
            raise PipelineError(f"{match['host']} has no {package} with the tag {tag!r}")
        version = str(found["version"]).rpartition("/")[2]
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


def _call(
    client: Any,
    action: str,
    call: Callable[..., Any],
    *args: str,
    unless: RefusalKind | None = None,
    **options: str,
) -> Any:
    """Returns the result of a call; None where it is refused as `unless` says."""
    try:
        # Versions are digests of the content: an upload can be repeated.
        with platform_errors(action):
            return retry_policy(action, client._auth)(call)(*args, **options)
    except PlatformError as error:
        if unless and refusal_kind(error.__cause__) is unless:
            return None
        raise
