"""KFP repository in Artifact Registry: compiled pipelines, with versions by content and tags that move."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardline.components.vertex.client import platform_errors, retry_policy
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.trainer.base.errors import PipelineError, PlatformError, SettingsError

T = TypeVar("T")

_URL = re.compile(
    r"(?P<host>https://[a-z0-9-]+-kfp\.pkg\.dev/[^/]+/[^/]+)/(?P<package>[^/]+)"
    r"/(?P<version>sha256:[0-9a-f]{64}|[\w.-]+)"
)
#: As Artifact Registry has it; kfp checks no tag before it sends it.
_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Uploaded:
    """A version, sha256:..., of a pipeline in the registry.

    Attributes:
        is_new: Whether the version was not there before.
        moved: What each tag pointed at before, of those that did not point at the version already; "" for
            one that is new.
    """

    registry: str
    package: str
    version: str
    is_new: bool
    moved: dict[str, str]

    @property
    def url(self) -> str:
        """What `submit` and schedules take, for exactly this version."""
        return f"{self.registry}/{self.package}/{self.version}"


def check_tags(tags: Sequence[str]) -> None:
    """Checks the form of tags; raises SettingsError when one has another."""
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise SettingsError(
                f"a tag must have lower-case letters, digits, ., _ and -, and begin with a letter or digit, "
                f"got {tag!r}"
            )


def upload_requests(registry: str, package: str, file: Path, tags: Sequence[str]) -> Any:
    """Returns what `upload` asks the registry for, as JSON."""
    version = _digest(file.read_bytes())
    return {
        "upload": {"url": registry, "package": package, "content": str(file), "version": version},
        "tags": dict.fromkeys(tags, f"{package}/{version}"),
    }


def upload(registry: str, package: str, file: Path, tags: Sequence[str]) -> Uploaded:
    """Uploads a compiled pipeline, unless the registry has it already, and makes the tags point at it.

    A tag that is there is moved in one step, once the new version is complete: whoever asks for it gets the
    old version or the new one. Repeated, it does what is still to be done. `registry` is
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
    """Returns a pipeline's YAML from the registry, and the address of exactly that version.

    Raises PipelineError for another form, PlatformError when there is no such version or no answer.
    """
    found = _URL.fullmatch(url)
    if found is None:
        raise PipelineError(
            f"{url!r} is not the address of a pipeline in a registry; the form is "
            "https://LOCATION-kfp.pkg.dev/PROJECT/REPOSITORY/PACKAGE/TAG, or .../sha256:DIGEST"
        )
    repository, package, version = _Repository(found["host"]), found["package"], found["version"]
    if not version.startswith("sha256:"):
        tag, version = version, repository.tagged(package, version)
        if not version:
            raise PipelineError(f"{found['host']} has no {package} with the tag {tag!r}")
    return repository.download(package, version), f"{found['host']}/{package}/{version}"


def _digest(content: bytes) -> str:
    """Returns the version under which the registry has a content."""
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
        found = self._find(f"read the tag {tag}", self._client.get_tag, package, tag)
        return str(found["version"]).rpartition("/")[2] if found else ""

    def upload(self, package: str, file: Path) -> tuple[str, str]:
        """Uploads a version and returns its package and name."""
        found: tuple[str, str] = self._ask(f"upload {package}", self._client.upload_pipeline, str(file))
        return found

    def tag(self, package: str, version: str, tag: str, *, is_there: bool) -> None:
        """Makes a tag point at a version."""
        change = self._client.update_tag if is_there else self._client.create_tag
        try:
            self._ask(f"set the tag {tag}", change, package, version, tag)
        except PlatformError as error:
            # After an attempt whose answer was lost, the next one finds the tag there.
            if (
                refusal_kind(error.__cause__) is not RefusalKind.CONFLICT
                or self.tagged(package, tag) != version
            ):
                raise

    def download(self, package: str, version: str) -> bytes:
        """Returns a version's content; raises PlatformError when it is not what the version's name says."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "pipeline.yaml"
            call = self._client.download_pipeline
            self._ask(f"download {package}/{version}", call, package, version=version, file_name=str(path))
            content = path.read_bytes()
        digest = _digest(content)
        if digest != version:
            raise PlatformError(
                f"what {self.host} has as {package}/{version} has the digest {digest}: it was damaged or "
                "exchanged; upload it again"
            )
        return content

    def _find(self, doing: str, call: Callable[..., T], *args: str) -> T | None:
        """Returns what a call gives; None when it finds nothing."""
        try:
            return self._ask(doing, call, *args)
        except PlatformError as error:
            if refusal_kind(error.__cause__) is RefusalKind.MISSING:
                return None
            raise

    def _ask(self, doing: str, call: Callable[..., T], *args: str, **options: str) -> T:
        # The content is the version's name: what is uploaded twice is there once.
        with platform_errors(doing):
            return retry_policy(doing, self._client._auth)(call)(*args, **options)
