"""Artifact Registry: pipelines in KFP's format, as kfp.registry.RegistryClient uses it.

Sources: https://artifactregistry.googleapis.com/$discovery/rest?version=v1 and
https://cloud.google.com/vertex-ai/docs/pipelines/create-pipeline-template.
"""

from __future__ import annotations

import email
import hashlib
import re
from typing import Any

import yaml
from google.rpc import code_pb2

from tests.contract.fake.api import ApiError, now, refuse
from tests.contract.fake.web import WebRequest, route

_KFP = r"[a-z]+-[a-z]+\d-kfp\.pkg\.dev"
_API = r"artifactregistry\.googleapis\.com"
_REPOSITORY = "/v1/projects/{project}/locations/{location}/repositories/{repository}"
_PACKAGE = f"{_REPOSITORY}/packages/{{package}}"

REGISTRY_ROUTES = (
    route("UploadPipeline", "POST", _KFP, "/{project}/{repository}"),
    route("DownloadPipeline", "GET", _KFP, "/{project}/{repository}/{package}/{version}"),
    route("GetVersion", "GET", _API, f"{_PACKAGE}/versions/{{version}}"),
    route("GetTag", "GET", _API, f"{_PACKAGE}/tags/{{tag}}"),
    route("CreateTag", "POST", _API, f"{_PACKAGE}/tags"),
    route("UpdateTag", "PATCH", _API, f"{_PACKAGE}/tags/{{tag}}"),
)


class Package:
    """One pipeline: what was uploaded and when, by "sha256:...", and versions by tag."""

    def __init__(self) -> None:
        self.versions: dict[str, bytes] = {}
        self.created: dict[str, str] = {}
        self.tags: dict[str, str] = {}


class Registry:
    """Answers what a RegistryClient asks; packages are by their whole names. All repositories exist."""

    def __init__(self) -> None:
        self.packages: dict[str, Package] = {}

    def add_image(self, image: str) -> None:
        """Makes a container image exist: LOCATION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG."""
        path, _, tag = image.partition(":")
        host, project, repository, name = path.split("/", 3)
        location = host.removesuffix("-docker.pkg.dev")
        package = Package()
        version = f"sha256:{hashlib.sha256(image.encode()).hexdigest()}"
        package.versions[version], package.created[version] = b"", _time()
        package.tags[tag] = version
        parent = f"projects/{project}/locations/{location}/repositories/{repository}"
        self.packages[f"{parent}/packages/{name}"] = package

    def upload_pipeline(self, request: WebRequest) -> bytes:
        """Takes a compiled pipeline; the same content again is the same version, and its tags move."""
        parts = _parts(request)
        content = parts.get("content", b"")
        try:
            documents = list(yaml.safe_load_all(content))
            package = documents[0]["pipelineInfo"]["name"]
        except (yaml.YAMLError, LookupError, TypeError):
            raise ApiError(code_pb2.INVALID_ARGUMENT, "the file is no compiled pipeline") from None
        tags = [tag for tag in parts.get("tags", b"").decode().split(",") if tag]
        refuse(*(f"tag {tag!r} is invalid" for tag in tags if not _is_tag(tag)))
        version = f"sha256:{hashlib.sha256(content).hexdigest()}"
        location = request.host.removesuffix("-kfp.pkg.dev")
        repository = "projects/{project}/locations/{}/repositories/{repository}"
        name = f"{repository.format(location, **request.fields)}/packages/{package}"
        found = self.packages.setdefault(name, Package())
        found.versions[version] = content
        found.created.setdefault(version, _time())
        found.tags |= dict.fromkeys(tags, version)
        return f"{package}/{version}".encode()

    def download_pipeline(self, request: WebRequest) -> bytes:
        location = request.host.removesuffix("-kfp.pkg.dev")
        _, package = self._package({**request.fields, "location": location})
        version = request.fields["version"]
        return package.versions[self._version(package, package.tags.get(version, version))]

    def resolve(self, uri: str) -> tuple[dict[str, Any], str]:
        """Returns the pipeline of a template's address, and its version."""
        host, project, repository, package, version = uri.removeprefix("https://").split("/")
        names = {"project": project, "repository": repository, "package": package, "version": version}
        _, found = self._package({**names, "location": host.removesuffix("-kfp.pkg.dev")})
        version = self._version(found, found.tags.get(version, version))
        return next(iter(yaml.safe_load_all(found.versions[version]))), version

    def get_version(self, request: WebRequest) -> dict[str, Any]:
        name, package = self._package(request.fields)
        return _as_version(name, package, self._version(package, request.fields["version"]))

    def get_tag(self, request: WebRequest) -> dict[str, Any]:
        name, package = self._package(request.fields)
        return _as_tag(name, package, self._tag(package, request.fields["tag"]))

    def create_tag(self, request: WebRequest) -> dict[str, Any]:
        (tag,) = request.query.get("tagId", [""])
        name, package = self._package(request.fields)
        refuse(*(() if _is_tag(tag) else (f"tag {tag!r} is invalid",)))
        if tag in package.tags:
            raise ApiError(code_pb2.ALREADY_EXISTS, f"tag {tag!r} already exists")
        return self._set_tag(name, package, tag, request)

    def update_tag(self, request: WebRequest) -> dict[str, Any]:
        name, package = self._package(request.fields)
        tag = self._tag(package, request.fields["tag"])
        return self._set_tag(name, package, tag, request)

    def _set_tag(self, name: str, package: Package, tag: str, request: WebRequest) -> dict[str, Any]:
        wanted = yaml.safe_load(request.body)["version"].rpartition("/")[2]
        package.tags[tag] = self._version(package, wanted)
        return _as_tag(name, package, tag)

    def _package(self, fields: Any) -> tuple[str, Package]:
        name = f"{_repository(fields)}/packages/{fields['package']}"
        if name not in self.packages:
            raise ApiError(code_pb2.NOT_FOUND, f'Package "{name}" was not found')
        return name, self.packages[name]

    def _version(self, package: Package, version: str) -> str:
        if version not in package.versions:
            raise ApiError(code_pb2.NOT_FOUND, f'Version "{version}" was not found')
        return version

    def _tag(self, package: Package, tag: str) -> str:
        if tag not in package.tags:
            raise ApiError(code_pb2.NOT_FOUND, f'Tag "{tag}" was not found')
        return tag


def _parts(request: WebRequest) -> dict[str, bytes]:
    """Returns the parts of a form by name."""
    head = f"Content-Type: {request.headers.get('content-type', '')}\r\n\r\n".encode()
    message = email.message_from_bytes(head + request.body)
    refuse(*(() if message.is_multipart() else ("the body is no form",)))
    parts = message.get_payload()
    return {
        str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)
        for part in parts  # type: ignore[union-attr]
    }


def _repository(fields: Any) -> str:
    return f"projects/{fields['project']}/locations/{fields['location']}/repositories/{fields['repository']}"


def _as_version(name: str, package: Package, version: str) -> dict[str, Any]:
    tags = [_as_tag(name, package, tag) for tag, tagged in package.tags.items() if tagged == version]
    time = package.created[version]
    full = f"{name}/versions/{version}"
    return {"name": full, "createTime": time, "updateTime": time, "relatedTags": tags}


def _as_tag(name: str, package: Package, tag: str) -> dict[str, Any]:
    return {"name": f"{name}/tags/{tag}", "version": f"{name}/versions/{package.tags[tag]}"}


def _is_tag(tag: str) -> bool:
    return re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,127}", tag) is not None


def _time() -> str:
    return now().isoformat().replace("+00:00", "Z")
