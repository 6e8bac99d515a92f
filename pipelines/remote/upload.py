"""KFP repository in Artifact Registry: compiled pipelines, versioned by content, and their tags."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardline.components.vertex.client import platform_errors, retry_policy
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.trainer.base.errors import PipelineError, PlatformError, SettingsError

T = TypeVar("T")

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


def check_tags(tags: Sequence[str]) -> None:
    """Checks the format of tags; raises SettingsError."""
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise SettingsError(
                f"a tag must have lower-case letters, digits, ., _ and -, and begin with a letter or digit, "
                f"got {tag!r}"
            )


def upload(registry: str, package: str, file: Path, tags: Sequence[str]) -> Uploaded:
    """Uploads a compiled pipeline, unless the registry has it already, and moves the tags to it.

    A tag is moved atomically, after the upload of the new version: readers get the old version or the new
    one. Repeated, it does what is left. `registry` is
    https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY, `package` the pipeline's name there.

    Raises:
        PlatformError: When the registry refuses or is not reached.
    """
    repository = _Repository(registry)
    version = _digest(file.read_bytes())
    is_new = not repository.has(package, version)
    if is_new:
        package, version = repository.upload(package, file)
    moved = {}
    for tag in dict.fromkeys(tags):
        before = repository.tagged(package, tag)
        if before != version:
            repository.tag(package, version, tag, is_there=bool(before))
            moved[tag] = before
    return Uploaded(repository.host, package, version, is_new, moved)


def download(url: str) -> tuple[bytes, str]:
    """Returns a pipeline's YAML from the registry, and the URL of exactly that version.

    Raises PipelineError for a malformed URL, PlatformError when the version cannot be read.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise PipelineError(
            f"{url!r} is not the URL of a pipeline in a registry; the format is "
            "https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY/PACKAGE/TAG, or .../sha256:DIGEST"
        )
    repository, package, version = _Repository(match["host"]), match["package"], match["version"]
    if not version.startswith("sha256:"):
        tag, version = version, repository.tagged(package, version)
        if not version:
            raise PipelineError(f"{match['host']} has no {package} with the tag {tag!r}")
    return repository.download(package, version), f"{match['host']}/{package}/{version}"


def _digest(content: bytes) -> str:
    """Returns the registry's version of a content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class _Repository:
    """kfp's client of one repository, with our retries."""

    def __init__(self, host: str) -> None:
        from kfp.registry import RegistryClient

        self.host = host.rstrip("/")
        with platform_errors("sign in to Google Cloud"):
            self._client = RegistryClient(self.host)

    def has(self, package: str, version: str) -> bool:
        """Whether it has a version of a package."""
        return bool(self._find(f"look for {package}", self._client.get_version, package, version))

    def tagged(self, package: str, tag: str) -> str:
        """Returns the version that a tag points at; "" where there is no such tag."""
        reference = self._find(f"read the tag {tag}", self._client.get_tag, package, tag)
        return str(reference["version"]).rpartition("/")[2] if reference else ""

    def upload(self, package: str, file: Path) -> tuple[str, str]:
        """Uploads a version and returns its package and name."""
        version: tuple[str, str] = self._call(f"upload {package}", self._client.upload_pipeline, str(file))
        return version

    def tag(self, package: str, version: str, tag: str, *, is_there: bool) -> None:
        """Makes a tag point at a version."""
        change = self._client.update_tag if is_there else self._client.create_tag
        try:
            self._call(f"set the tag {tag}", change, package, version, tag)
        except PlatformError as error:
            # After an attempt whose response was lost, the next one finds the tag.
            if (
                refusal_kind(error.__cause__) is not RefusalKind.CONFLICT
                or self.tagged(package, tag) != version
            ):
                raise

    def download(self, package: str, version: str) -> bytes:
        """Returns a version's content; raises PlatformError when its digest differs."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "pipeline.yaml"
            call = self._client.download_pipeline
            self._call(f"download {package}/{version}", call, package, version=version, file_name=str(path))
            content = path.read_bytes()
        digest = _digest(content)
        if digest != version:
            raise PlatformError(
                f"{package}/{version} in {self.host} has the digest {digest}: it was damaged or "
                "replaced; upload it again"
            )
        return content

    def _find(self, action: str, call: Callable[..., T], *args: str) -> T | None:
        """Returns the result of a call; None for status 404."""
        try:
            return self._call(action, call, *args)
        except PlatformError as error:
            if refusal_kind(error.__cause__) is RefusalKind.MISSING:
                return None
            raise

    def _call(self, action: str, call: Callable[..., T], *args: str, **options: str) -> T:
        # Versions are digests of the content: an upload can be repeated.
        with platform_errors(action):
            return retry_policy(action, self._client._auth)(call)(*args, **options)
