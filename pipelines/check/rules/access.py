"""Rules about who a custom job runs as, what it can reach, and where it writes.

Rules about secrets where everybody can read them. A finding never shows the secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardline.components.vertex.payload import at, known_text, lacks, list_at
from shardline.pipelines.check.job import Job, Pool
from shardline.pipelines.check.pipeline import Executor, Parameter, Task
from shardline.pipelines.check.registry import error, warning

_TENSORBOARD = re.compile(r"projects/[^/]+/locations/[^/]+/tensorboards/[^/]+")
_NETWORK = re.compile(r"projects/\d+/global/networks/[^/]+")
_KEY = re.compile(r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+")
_ACCOUNT = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")


@error("SL211", Job, fix="set service_account; {{$.pipeline_service_account}} is the pipeline's own")
def tensorboard_has_an_account(job: Job) -> Iterator[str]:
    """TensorBoard needs a service account.

    Source: google.cloud.aiplatform.CustomJob.run: "service_account is required with provided tensorboard".
    """
    if job.text("tensorboard") and lacks(job.spec, "service_account"):
        yield "the job has a tensorboard and no service_account"


@error("SL212", Job, fix="leave out network or psc_interface_config")
def network_is_one(job: Job) -> Iterator[str]:
    """A job has a peered network or Private Service Connect, not both.

    Source: docs.cloud.google.com, training/psc-i-egress and general/vpc-peering: one is the alternative to
    the other.
    """
    if known_text(job.spec.get("network")) and job.spec.get("psc_interface_config"):
        yield "the job has both network and psc_interface_config"


@warning("SL213", Job, fix="set service_account; {{$.pipeline_service_account}} is the pipeline's own")
def persistent_resource_has_an_account(job: Job) -> Iterator[str]:
    """A job on a persistent resource names its service account.

    Source: google.cloud.aiplatform_v1.types.ServiceAccountSpec: a resource with enable_custom_service_account
    enforces one on every job.
    """
    if known_text(job.spec.get("persistent_resource_id")) and lacks(job.spec, "service_account"):
        yield "the job runs on a persistent resource and has no service_account"


@warning(
    "SL214", Job, fix="set base_output_directory: the trainer writes to AIP_TENSORBOARD_LOG_DIR below it"
)
def tensorboard_has_logs(job: Job) -> Iterator[str]:
    """TensorBoard has a directory of logs to read.

    Source: google.cloud.aiplatform_v1.types.CustomJobSpec: AIP_TENSORBOARD_LOG_DIR is set only with
    base_output_directory.
    """
    if job.text("tensorboard") and lacks(job.spec, "base_output_directory", "output_uri_prefix"):
        yield "the job has a tensorboard and no base_output_directory"


@error("SL215", Job, fix="write projects/PROJECT/locations/LOCATION/tensorboards/ID")
def tensorboard_name_is_full(job: Job) -> Iterator[str]:
    """A TensorBoard is given by its full name.

    Source: google.cloud.aiplatform_v1.types.CustomJobSpec.
    """
    yield from _unless(_TENSORBOARD, "tensorboard", job.text("tensorboard"))


@error("SL216", Job, fix="write projects/PROJECT_NUMBER/global/networks/NAME, with the project's number")
def network_name_is_full(job: Job) -> Iterator[str]:
    """A network is given by its full name, with the project's number.

    Source: google.cloud.aiplatform_v1.types.CustomJobSpec: "{project} is a project number".
    """
    yield from _unless(_NETWORK, "network", job.text("network"))


@error("SL217", Job, fix="write projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY")
def key_name_is_full(job: Job) -> Iterator[str]:
    """An encryption key is given by its full name.

    Source: google.cloud.aiplatform_v1.types.EncryptionSpec.
    """
    found = at(job.content, "encryption_spec").get("kms_key_name")
    yield from _unless(_KEY, "kms_key_name", known_text(found))


@error("SL218", Job, fix="write the account's e-mail address, NAME@PROJECT.iam.gserviceaccount.com")
def account_is_an_address(job: Job) -> Iterator[str]:
    """A service account is given by its e-mail address.

    Source: docs.cloud.google.com, training/custom-service-account.
    """
    yield from _unless(_ACCOUNT, "service_account", job.text("service_account"))


@error("SL219", Job, fix="write gs://BUCKET/PATH")
def output_is_in_a_bucket(job: Job) -> Iterator[str]:
    """base_output_directory is a Cloud Storage location.

    Source: google.cloud.aiplatform_v1.types.GcsDestination.
    """
    found = known_text(at(job.spec, "base_output_directory").get("output_uri_prefix"))
    if found and not found.startswith("gs://"):
        yield f"base_output_directory is {found!r}"


@warning("SL220", Job, fix="set network, or leave out reserved_ip_ranges")
def ip_ranges_have_a_network(job: Job) -> Iterator[str]:
    """Reserved IP ranges belong to a network.

    Source: google.cloud.aiplatform_v1.types.CustomJobSpec: ranges "under the VPC network".
    """
    if job.spec.get("reserved_ip_ranges") and lacks(job.spec, "network"):
        yield "the job has reserved_ip_ranges and no network"


def _unless(pattern: re.Pattern[str], name: str, found: str) -> Iterator[str]:
    if found and "{{$" not in found and not pattern.fullmatch(found):
        yield f"{name} is {found!r}"


#: What keys look like: their makers document a fixed beginning and length.
_SECRETS = {
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a Google API key": re.compile(r"\bAIza[0-9A-Za-z_-]{35}\b"),
    "a Google OAuth token": re.compile(r"\bya29\.[0-9A-Za-z_-]{20,}"),
    "a Google OAuth client secret": re.compile(r"\bGOCSPX-[0-9A-Za-z_-]{20,}"),
    "an AWS access key": re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(r"\b(gh[pousr]_[0-9A-Za-z]{36,}|github_pat_[0-9A-Za-z_]{60,})"),
    "a GitLab token": re.compile(r"\bglpat-[0-9A-Za-z_-]{20,}"),
    "a Slack token": re.compile(r"\bxox[abprs]-[0-9A-Za-z-]{10,}"),
    "a Hugging Face token": re.compile(r"\bhf_[0-9A-Za-z]{30,}\b"),
    "an OpenAI or Anthropic key": re.compile(r"\bsk-(?:ant-|proj-)?[0-9A-Za-z_-]{32,}"),
    "a password in an address": re.compile(r"\b[a-z][a-z0-9+]*://[^/\s:@{}$<]+:[^/\s:@{}$<]+@[\w.-]+"),
}
#: Names whose value is a secret when it is given as a plain text.
_NAMES = re.compile(r"(?i)(^|[_-])(password|passwd|secret_key|api_?key|access_key|private_key|auth_token)$")
_FIX = "read it from Secret Manager at run time, take it out, and revoke it"


@error("SL811", Parameter, fix=_FIX)
def parameter_holds_no_secret(parameter: Parameter) -> Iterator[str]:
    """A pipeline's parameter holds no secret.

    Source: docs.cloud.google.com, secret-manager/docs/best-practices; parameters are shown in the console.
    """
    yield from _found(parameter.name, parameter.pipeline.value(parameter.name))


@error("SL812", Task, fix=_FIX)
def constant_holds_no_secret(task: Task) -> Iterator[str]:
    """A constant that a task is given holds no secret.

    Source: docs.cloud.google.com, secret-manager/docs/best-practices.
    """
    for name, item in task.inputs("parameters").items():
        if item and "runtimeValue" in item:
            yield from _found(name, task.value(name))


@error("SL813", Pool, fix=_FIX)
def replica_environment_holds_no_secret(pool: Pool) -> Iterator[str]:
    """A replica's environment variables hold no secret.

    Source: docs.cloud.google.com, secret-manager/docs/best-practices: not in environment variables.
    """
    for item in pool.env:
        yield from _found(str(item.get("name", "")), item.get("value"))


@error("SL814", Executor, fix=_FIX)
def container_holds_no_secret(executor: Executor) -> Iterator[str]:
    """A container's environment, command and source hold no secret.

    Source: docs.cloud.google.com, secret-manager/docs/best-practices.
    """
    container = executor.container
    for item in list_at(container, "env"):
        yield from _found(str(item.get("name", "")), item.get("value"))
    for part in [*list_at(container, "command"), *list_at(container, "args")]:
        yield from _found("command", part)


def _found(name: str, value: Any) -> Iterator[str]:
    text = known_text(value) if isinstance(value, str) else str(value)
    kinds = [kind for kind, pattern in _SECRETS.items() if pattern.search(text)]
    if not kinds and known_text(value) and _NAMES.search(name):
        kinds = ["a secret, by its name"]
    if kinds:
        yield f"{name} holds {kinds[0]}"
