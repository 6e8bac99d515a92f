"""Doctor: diagnoses of this machine for local runs, and of the platform for runs there.

Read-only: nothing is created or changed. What this account may not read on the platform is a warning: it may
still be in order.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from shardline.components.custom_job import CustomJobSettings
from shardline.components.text import enumerate_names
from shardline.components.vertex import platform_errors
from shardline.pipelines.settings import Environment, Settings
from shardline.trainer.base import progress
from shardline.trainer.base.errors import PlatformError, ShardlineError, page
from shardline.trainer.base.plugins import installed_version

if TYPE_CHECKING:
    from google.auth.transport.requests import AuthorizedSession


@dataclass(frozen=True)
class Diagnosis:
    """One line of the doctor's report: what was checked ("bucket"), the result, and what to do, or "".

    The level "warning" says that it may suffice, or could not be checked, "error" that runs will fail.
    """

    level: Literal["ok", "warning", "error"]
    what: str
    found: str
    fix: str = ""


#: A diagnosis of each level, from the other fields.
ok, warning, error = (partial(Diagnosis, level) for level in ("ok", "warning", "error"))

_GIB = 2**30
#: A replica with TensorFlow takes about half a GiB before it has loaded any data.
_MEMORY = (2 * _GIB, 6 * _GIB)
_REPLICAS = 2
_CONSTRAINTS = Path(__file__).with_name("project") / "template" / "common" / "constraints.txt"
#: Packages whose versions matter most.
_MAIN = ("tensorflow", "keras", "kfp", "google-cloud-pipeline-components", "google-cloud-aiplatform", "numpy")


def examine_machine(runs_dir: Path, *, toy: bool = True) -> Iterator[Diagnosis]:
    """Yields a diagnosis of each check; `toy` runs a job of two replicas, which takes some seconds."""
    yield from _versions()
    if (cores := len(os.sched_getaffinity(0))) < _REPLICAS:
        yield warning("cores", str(cores), "replicas share cores; a run is slow, not wrong")
    else:
        yield ok("cores", str(cores))
    runs = runs_dir.absolute()
    existing = next(path for path in (runs, *runs.parents) if path.is_dir())
    for what, path in (("run directory", existing), ("TMPDIR", Path(tempfile.gettempdir()))):
        if not os.access(path, os.W_OK):
            yield error("disk", f"{what}: {path} cannot be written", "choose another directory")
            continue
        free = shutil.disk_usage(path).free
        found = f"{what}: {free / _GIB:.1f} GiB free in {path}"
        yield _compare("disk", found, free, (1 * _GIB, 5 * _GIB), "make room, or choose another directory")
    if installed_version("psutil") is None:
        what = "memory, network, toy job: psutil is not installed"
        yield warning("not checked", what, "pip install 'shardline[local]'")
        return
    yield from _memory_and_network()
    if not toy:
        yield ok(
            "toy job",
            "not run, since it takes longer than all other checks: 'shardline doctor --local' runs it",
        )
    elif installed_version("tensorflow"):
        yield _toy_job()


def _versions() -> Iterator[Diagnosis]:
    installed = {name: installed_version(name) for name in _MAIN}
    missing = [name for name, version in installed.items() if version is None]
    if missing:
        found = f"not installed: {', '.join(missing)}; nothing can run on this machine"
        yield warning("packages", found, "pip install 'shardline[local]'")
        return
    versions = ", ".join(f"{name} {installed[name]}" for name in ("tensorflow", "keras", "kfp"))
    pins = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)$", _CONSTRAINTS.read_text(encoding="utf-8")))
    differing = [
        f"{name} {has} ({pin})"
        for name, pin in pins.items()
        if (has := installed_version(name)) not in (None, pin)
    ]
    if differing:
        found = f"other versions than tested: {enumerate_names(differing, 4)}"
        yield warning("packages", found, "pip install -c constraints.txt 'shardline[local]'")
    else:
        yield ok("packages", f"{versions}, all as in constraints.txt")


def _compare(what: str, found: str, amount: int, limits: tuple[int, int], fix: str) -> Diagnosis:
    least, enough = limits
    if amount < least:
        return error(what, found, fix)
    return warning(what, found, fix) if amount < enough else ok(what, found)


def _memory_and_network() -> Iterator[Diagnosis]:
    import psutil

    from shardline.pipelines.local.process import REMEDY, isolation_unavailable

    free = psutil.virtual_memory().available
    found = f"{free / _GIB:.1f} GiB available"
    yield _compare("memory", found, free, _MEMORY, "close other programs, or use fewer replicas")
    if reason := isolation_unavailable():
        found = f"jobs share this machine's network, which exposes their servers: {reason}"
        yield warning("network", found, REMEDY)
    else:
        found = "a job with several replicas has its own network, which cannot be reached from outside"
        yield ok("network", found)


# TensorFlow loads, the replicas reach each other, and a collective works.
_SUM = f"""
from shardline.trainer.loop.process import this_process
total = this_process({{}}).collectives.total([1])
assert total == [{_REPLICAS}], f"{_REPLICAS} replicas added up to {{total}}"
"""


def _toy_job() -> Diagnosis:
    from shardline.pipelines.local.job import CustomJob, run_job
    from shardline.pipelines.local.process import scratch_directory

    command = (sys.executable, "-c", _SUM)
    job = CustomJob.with_roles(command, _REPLICAS, timeout=120.0, disable_retries=True)
    began = time.monotonic()
    with scratch_directory() as directory:
        try:
            with progress.sink(lambda event: None):
                run_job(job, directory / "logs", topic="handshake")
        except ShardlineError as failed:
            logs = sorted((directory / "logs").glob("*.log"))
            last = [f"{log.stem}: {text[-1]}" for log in logs if (text := log.read_text().splitlines())]
            return error("toy job", "; ".join([str(failed), *last]), "fix this before anything else")
    seconds = time.monotonic() - began
    return ok("toy job", f"{_REPLICAS} replicas of TensorFlow added up a number in {seconds:.0f} s")


_IMAGE = re.compile(
    r"(?P<location>[a-z0-9-]+)-docker\.pkg\.dev/(?P<project>[^/]+)/(?P<repository>[^/]+)/"
    r"(?P<name>[^:@]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)

_APIS = ("aiplatform", "artifactregistry", "iam", "logging", "storage")
#: Permissions that submitting, watching and explaining runs needs.
_PERMISSIONS = (
    "aiplatform.pipelineJobs.create",
    "aiplatform.pipelineJobs.get",
    "aiplatform.pipelineJobs.list",
    "aiplatform.schedules.create",
    "logging.logEntries.list",
)
_OBJECTS = tuple(f"storage.objects.{verb}" for verb in ("create", "get", "list", "delete"))


def examine_platform(environment: Environment, settings: Settings | None = None) -> Iterator[Diagnosis]:
    """Yields a diagnosis of each check.

    Without the pipeline's settings, its image and network are not checked.
    """
    # Outside Google Cloud there is no metadata server: do not wait for it.
    os.environ.setdefault("GCE_METADATA_TIMEOUT", "1")
    os.environ.setdefault("GCE_METADATA_DETECT_RETRIES", "1")
    checks: list[tuple[str, Callable[..., Diagnosis]]] = [
        ("project", _project),
        ("permissions", _permissions),
        ("APIs", _apis),
        ("bucket", _bucket),
        ("service account", _service_account),
    ]
    if settings is not None:
        serving = settings.model_upload.serving_image_uri if settings.model_upload else settings.image
        images = dict.fromkeys((settings.image, serving))
        checks += [("image", partial(find_image, image)) for image in images]
        yield _training_network(settings.train, environment)
    try:
        session, account = connect()
    except PlatformError as refused:
        found, _, fix = str(refused).partition("; ")
        yield error("credentials", found, fix)
        names = ", ".join(dict.fromkeys(what for what, _ in checks))
        yield warning("not checked", names, "they need credentials")
        return
    yield ok("credentials", account)
    for what, check in checks:
        try:
            with platform_errors("check it"):
                yield check(environment, session)
        except PlatformError as refused:
            found, _, fix = str(refused).partition("; ")
            yield warning(what, found, fix)


def connect() -> tuple[AuthorizedSession, str]:
    """Returns a session with Google's APIs and its account's name; PlatformError without credentials."""
    import google.auth
    from google.auth.transport.requests import AuthorizedSession, Request

    with platform_errors("sign in to Google Cloud"):
        credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
        credentials.refresh(Request())  # type: ignore[no-untyped-call]
    account = getattr(credentials, "service_account_email", "") or getattr(credentials, "account", "")
    return AuthorizedSession(credentials), account or "a user's credentials"  # type: ignore[no-untyped-call]


def _ask(
    session: AuthorizedSession,
    api: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    **query: Sequence[str],
) -> dict[str, Any]:
    """Gets "v1/projects/..." of an API, "iam", or posts `body` to it; empty for status 404."""
    url, verb = f"https://{api}.googleapis.com/{path}", "GET" if body is None else "POST"
    answer = session.request(verb, url, params=query, json=body, timeout=30)  # type: ignore[no-untyped-call]
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return {}
    answer.raise_for_status()
    return dict(answer.json())


def find_image(image: str, environment: Environment, session: AuthorizedSession) -> Diagnosis:
    """Checks that an image of the settings exists in Artifact Registry; HTTPError when it refuses."""
    match = _IMAGE.fullmatch(image)
    if match is None:
        return warning(
            "image", f"{image} is not in Artifact Registry", "whether it exists cannot be checked from here"
        )
    package = (
        f"v1/projects/{match['project']}/locations/{match['location']}/repositories/{match['repository']}"
        f"/packages/{quote(match['name'], safe='')}"
    )
    version = f"versions/{match['digest']}" if match["digest"] else f"tags/{match['tag'] or 'latest'}"
    if not _ask(session, "artifactregistry", f"{package}/{version}"):
        return error("image", f"{image} does not exist", "push it: 'make image push'")
    return ok("image", image)


def _project(environment: Environment, session: AuthorizedSession) -> Diagnosis:
    project = _ask(session, "cloudresourcemanager", f"v3/projects/{environment.project}")
    if not project:
        return error("project", f"{environment.project} does not exist", "correct project")
    if project.get("state", "ACTIVE") != "ACTIVE":
        return error("project", f"{environment.project} is {project['state']}", "restore it, or use another")
    return ok("project", f"{environment.project} (number {project['name'].rpartition('/')[2]})")


def _permissions(environment: Environment, session: AuthorizedSession) -> Diagnosis:
    path = f"v3/projects/{environment.project}:testIamPermissions"
    granted = _ask(session, "cloudresourcemanager", path, {"permissions": list(_PERMISSIONS)})
    missing = [name for name in _PERMISSIONS if name not in granted.get("permissions", ())]
    if missing:
        fix = "grant this account roles/aiplatform.user, and roles/logging.viewer to read logs"
        return error("permissions", f"this account lacks {', '.join(missing)}", fix)
    return ok("permissions", "this account may submit, schedule and explain runs")


def _apis(environment: Environment, session: AuthorizedSession) -> Diagnosis:
    parent = f"projects/{environment.project}"
    names = [f"{parent}/services/{api}.googleapis.com" for api in _APIS]
    services = _ask(session, "serviceusage", f"v1/{parent}/services:batchGet", names=names)
    states = {item["name"].rpartition("/")[2]: item["state"] for item in services.get("services", ())}
    missing = [f"{api}.googleapis.com" for api in _APIS if states.get(f"{api}.googleapis.com") != "ENABLED"]
    if missing:
        fix = f"run 'gcloud services enable {' '.join(missing)} --project {environment.project}'"
        return error("APIs", f"not enabled: {', '.join(missing)}", fix)
    return ok("APIs", f"enabled: {', '.join(_APIS)}")


def _bucket(environment: Environment, session: AuthorizedSession) -> Diagnosis:
    from google.api_core.exceptions import NotFound
    from google.cloud.storage import Client

    if not environment.pipeline_root:
        return warning("bucket", "pipeline_root is not set", "set it to gs://BUCKET/PATH; runs need it")
    name = environment.pipeline_root.removeprefix("gs://").partition("/")[0]
    try:
        bucket = Client(project=environment.project).get_bucket(name)
    except NotFound:
        fix = f"run 'gcloud storage buckets create gs://{name} --location {environment.location}'"
        return error("bucket", f"gs://{name} does not exist", fix)
    missing = sorted(set(_OBJECTS) - set(bucket.test_iam_permissions(list(_OBJECTS))))
    if missing:
        fix = "grant this account roles/storage.objectUser on it"
        return error("bucket", f"gs://{name}: this account lacks {', '.join(missing)}", fix)
    location = str(bucket.location).lower()
    if location != environment.location:
        found = f"gs://{name} is in {location}, and runs in {environment.location}"
        return warning(
            "bucket", found, f"use one in {environment.location}: it is faster, and traffic is free"
        )
    return ok("bucket", f"gs://{name} in {location}, readable and writable")


def _service_account(environment: Environment, session: AuthorizedSession) -> Diagnosis:
    account = environment.service_account
    if not account:
        found = "service_account is not set: runs use the project's default, often with too many permissions"
        return warning("service account", found, "create one for runs and set service_account")
    path = f"v1/projects/-/serviceAccounts/{account}"
    existing = _ask(session, "iam", path)
    if not existing:
        return error("service account", f"{account} does not exist", "create it or correct service_account")
    if existing.get("disabled"):
        return error("service account", f"{account} is disabled", "enable it")
    act_as = "iam.serviceAccounts.actAs"
    granted = _ask(session, "iam", f"{path}:testIamPermissions", {"permissions": [act_as]})
    if act_as not in granted.get("permissions", ()):
        fix = "grant this account roles/iam.serviceAccountUser on it"
        return error("service account", f"this account may not act as {account}", fix)
    return ok("service account", f"{account}; this account may act as it")


def _training_network(job: CustomJobSettings, environment: Environment) -> Diagnosis:
    """Diagnoses access to TensorFlow's servers, which have no authentication (docs/vertex.md)."""
    network = environment.network if job.network == CustomJobSettings.network else job.network
    if interface := job.extra.get("psc_interface_config"):
        network = str(dict(interface).get("network_attachment", "psc_interface_config"))
    if network and job.cluster.replica_count > 1:
        found = (
            f"clients in {network} that reach the replicas' ports can read and write as the service account"
        )
        return warning("training network", found, f"deny egress to their address range: {page('vertex')}")
    return ok("training network", "the replicas are not in a network of yours, or there is only one")
