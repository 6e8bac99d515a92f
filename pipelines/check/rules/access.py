"""Rules about who a custom job runs as, what it can reach, and where it writes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardline.pipelines.check.ir import at, known_text, lacks
from shardline.pipelines.check.job import Job
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
