"""Submission of a run, its request, shown or sent; and the registry of compiled pipelines."""

from __future__ import annotations

import copy
import datetime
import hashlib
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.components.custom_job import literal_string, mapping_at, whole_number
from shardline.components.runs import VertexRun
from shardline.components.text import facts, truncate
from shardline.components.vertex import Platform, RefusalKind, platform_errors, refusal_kind, retry_policy
from shardline.pipelines.check import Job, Pipeline
from shardline.pipelines.settings import Environment, missing_error
from shardline.pipelines.spec import all_tasks, declared_parameters, defaults
from shardline.trainer.base.errors import (
    PipelineError,
    PlatformError,
    RunError,
    SettingsError,
)

_MAX_ID = 127
_ROLES = ("chief", "workers", "servers", "evaluator")


def continue_parameters(platform: Platform, run: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a run that continues from the checkpoints of another; `parameters` override.

    Raises:
        RunError: When the other one is still running: both would write the same checkpoints.
        PlatformError: When there is no such run, or the platform is not reached.
    """
    previous = VertexRun(platform, run).read()
    if not previous.has_ended:
        raise RunError(f"the run {run} is {previous.state}; cancel it, or wait until it has ended")
    return {**previous.parameters, **parameters, "continue_run": previous.name}


def job_request(
    environment: Environment,
    spec: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    job_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    cached: bool = True,
    template_uri: str = "",
) -> dict[str, Any]:
    """Returns a CreatePipelineJobRequest in the API's JSON.

    `parameters` are checked values (`check_parameters`), without those that keep their default; `tags` are
    further labels of this run. Without a `job_id` it is the request of a schedule; "" is a new id.
    Tasks take no cached results unless `cached`. `template_uri` is the URL of the pipeline in the registry.
    Raises SettingsError when there is no pipeline root.
    """
    if not cached:
        spec = copy.deepcopy(dict(spec))
        for _, task in all_tasks(spec):
            task["cachingOptions"] = {}
    root = environment.pipeline_root or spec.get("defaultPipelineRoot")
    if not root:
        raise missing_error("pipeline_root")
    key = environment.encryption_spec_key_name
    job = {
        "displayName": spec["pipelineInfo"]["name"],
        "pipelineSpec": spec,
        "labels": {**environment.tags, **(tags or {})},
        "runtimeConfig": {"gcsOutputDirectory": root, "parameterValues": dict(parameters)},
        "serviceAccount": environment.service_account,
        "network": environment.network,
        "encryptionSpec": {"kmsKeyName": key} if key else {},
        "templateUri": template_uri,
    }
    request = {
        "parent": environment.platform.parent,
        "pipelineJob": {name: value for name, value in job.items() if value},
    }
    if job_id is not None:
        request["pipelineJobId"] = job_id or new_job_id(spec["pipelineInfo"]["name"])
    return request


def request_summary(
    request: Mapping[str, Any], parameters: Mapping[str, Any], *, file: str, proof: str
) -> str:
    """Returns a summary of a request of `job_request`; `file` is the pipeline's path or URL."""
    job = mapping_at(request, "pipelineJob")
    pipeline = Pipeline(mapping_at(job, "pipelineSpec"), parameters)
    default_values = defaults(pipeline.spec)
    changed = [
        f"{name}={truncate(value, 60)}"
        for name, value in parameters.items()
        if name not in default_values or value != default_values[name]
    ]
    if rest := len(declared_parameters(pipeline.spec)) - len(changed):
        changed.append(f"{rest} others keep their defaults")
    account = job.get("serviceAccount") or "the project's default service account"
    launchers = {literal_string(item.task.container.get("image")) for item in pipeline.jobs}
    images = [literal_string(executor.container.get("image")) for executor in pipeline.executors]
    images += [pool.image for item in pipeline.jobs for pool in item.pools]
    outputs = mapping_at(job, "runtimeConfig").get("gcsOutputDirectory")
    rows = [
        ("what", f"{job.get('displayName')}, {file}"),
        ("run", str(request.get("pipelineJobId") or "")),
        ("where", f"{request['parent']}, outputs below {outputs}"),
        ("as", str(account)),
        ("parameters", ", ".join(changed)),
        ("image", ", ".join(image for image in dict.fromkeys(images) if image not in launchers)),
        *(("training", _machines(item)) for item in pipeline.jobs),
        ("tags", ", ".join(f"{name}={value}" for name, value in mapping_at(job, "labels").items())),
        ("proof", proof),
    ]
    return facts([(name, value) for name, value in rows if value])


def _machines(job: Job) -> str:
    total = sum(pool.replica_count or 0 for pool in job.pools)
    pools = []
    for pool in job.pools:
        role = _ROLES[pool.index] if pool.index < len(_ROLES) else f"pool {pool.index}"
        count = "?" if pool.replica_count is None else pool.replica_count
        text = f"{role} {count} x {pool.machine_type or 'a machine of the run'}"
        if pool.accelerator_type:
            text += f" with {whole_number(pool.machine.get('accelerator_count'))} {pool.accelerator_type}"
        pools.append(text)
    return f"{', '.join(pools)} ({total} {'machine' if total == 1 else 'machines'})"


def new_job_id(name: str) -> str:
    """Returns an id that no other run of a pipeline has: NAME-YYYYMMDDhhmmss-6hex.

    Ids of the SDK have no random part, and collide within a second.
    """
    end = f"-{datetime.datetime.now(datetime.UTC):%Y%m%d%H%M%S}-{secrets.token_hex(3)}"
    word = name if name[:1].isalpha() else f"run-{name}"
    return word[: _MAX_ID - len(end)].rstrip("-") + end


_URL = re.compile(
    r"(?P<host>https://[a-z0-9-]+-kfp\.pkg\.dev/[^/]+/[^/]+)/(?P<package>[^/]+)"
    r"/(?P<version>sha256:[0-9a-f]{64}|[\w.-]+)"
)
#: Artifact Registry's format; kfp does not check tags.
_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")


def upload_pipeline(registry: str, package: str, file: Path, tags: Sequence[str]) -> tuple[str, bool]:
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


def download_pipeline(url: str) -> tuple[bytes, str]:
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
