"""Rules about access: who a custom job runs as, what it can reach, where it writes, and secrets.

A finding never shows the secret.
"""

from __future__ import annotations

from typing import Any

from shardline.components.vertex import forms
from shardline.components.vertex.payload import argv, at, known_text, lacks, list_at
from shardline.pipelines.check.job import Job, Pool
from shardline.pipelines.check.pipeline import Executor, Parameter, Task
from shardline.pipelines.check.registry import Found, rules
from shardline.pipelines.check.secrets import kind_of


@rules(Job)
def connections(job: Job) -> Found:
    """Accounts, networks and places of a custom job.

    SL211 error: TensorBoard needs a service account.
        Fix: set service_account; {{$.pipeline_service_account}} is the pipeline's own
        Source: google.cloud.aiplatform.CustomJob.run: "service_account is required with provided
            tensorboard".
    SL212 error: A job has a peered network or Private Service Connect, not both.
        Fix: leave out network or psc_interface_config
        Source: docs.cloud.google.com, training/psc-i-egress and general/vpc-peering: one is the alternative
            to the other.
    SL213 warning: A job on a persistent resource names its service account.
        Fix: set service_account; {{$.pipeline_service_account}} is the pipeline's own
        Source: google.cloud.aiplatform_v1.types.ServiceAccountSpec: a resource with
            enable_custom_service_account enforces one on every job.
    SL214 warning: TensorBoard has a directory of logs to read.
        Fix: set base_output_directory: the trainer writes to AIP_TENSORBOARD_LOG_DIR below it
        Source: google.cloud.aiplatform_v1.types.CustomJobSpec: AIP_TENSORBOARD_LOG_DIR is set only with
            base_output_directory.
    SL220 warning: Reserved IP ranges belong to a network.
        Fix: set network, or leave out reserved_ip_ranges
        Source: google.cloud.aiplatform_v1.types.CustomJobSpec: ranges "under the VPC network".
    SL215 error: A TensorBoard is given by its full name.
        Fix: write projects/PROJECT/locations/LOCATION/tensorboards/ID
        Source: google.cloud.aiplatform_v1.types.CustomJobSpec.
    SL216 error: A network is given by its full name, with the project's number.
        Fix: write projects/PROJECT_NUMBER/global/networks/NAME, with the project's number
        Source: google.cloud.aiplatform_v1.types.CustomJobSpec: "{project} is a project number".
    SL217 error: An encryption key is given by its full name.
        Fix: write projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY
        Source: google.cloud.aiplatform_v1.types.EncryptionSpec.
    SL218 error: A service account is given by its e-mail address.
        Fix: write the account's e-mail address, NAME@PROJECT.iam.gserviceaccount.com
        Source: docs.cloud.google.com, training/custom-service-account.
    SL219 error: base_output_directory is a Cloud Storage location.
        Fix: write gs://BUCKET/PATH
        Source: google.cloud.aiplatform_v1.types.GcsDestination.
    """
    spec = job.spec
    if job.text("tensorboard") and lacks(spec, "service_account"):
        yield "SL211", "the job has a tensorboard and no service_account"
    if known_text(spec.get("network")) and spec.get("psc_interface_config"):
        yield "SL212", "the job has both network and psc_interface_config"
    if known_text(spec.get("persistent_resource_id")) and lacks(spec, "service_account"):
        yield "SL213", "the job runs on a persistent resource and has no service_account"
    if job.text("tensorboard") and lacks(spec, "base_output_directory", "output_uri_prefix"):
        yield "SL214", "the job has a tensorboard and no base_output_directory"
    if spec.get("reserved_ip_ranges") and lacks(spec, "network"):
        yield "SL220", "the job has reserved_ip_ranges and no network"
    key = at(job.content, "encryption_spec").get("kms_key_name")
    for code, form, name, value in (
        ("SL215", forms.TENSORBOARD, "tensorboard", job.spec.get("tensorboard")),
        ("SL216", forms.NETWORK, "network", job.spec.get("network")),
        ("SL217", forms.ENCRYPTION_KEY, "kms_key_name", key),
        ("SL218", forms.SERVICE_ACCOUNT, "service_account", job.spec.get("service_account")),
        ("SL219", forms.BUCKET_PATH, "base_output_directory", job.base_output_directory),
    ):
        if (text := known_text(value)) and not form.fits(text):
            yield code, f"{name} is {text!r}"


@rules(Parameter, Task, Pool, Executor)
def secrets(part: Parameter | Task | Pool | Executor) -> Found:
    """Secrets where everybody can read them.

    SL811 error: A pipeline's parameter holds no secret.
        Fix: read it from Secret Manager at run time, take it out, and revoke it
        Source: docs.cloud.google.com, secret-manager/docs/best-practices; parameters are shown in the
            console.
    SL812 error: A constant that a task is given holds no secret.
    SL814 error: A container's environment, command and source hold no secret.
        Fix: read it from Secret Manager at run time, take it out, and revoke it
        Source: docs.cloud.google.com, secret-manager/docs/best-practices.
    SL813 error: A replica's environment variables hold no secret.
        Fix: read it from Secret Manager at run time, take it out, and revoke it
        Source: docs.cloud.google.com, secret-manager/docs/best-practices: not in environment variables.
    """
    match part:
        case Parameter():
            code, values = "SL811", [(part.name, part.pipeline.value(part.name))]
        case Task():
            given = part.inputs("parameters").items()
            constants = [name for name, item in given if item and "runtimeValue" in item]
            code, values = "SL812", [(name, part.value(name)) for name in constants]
        case Pool():
            code, values = "SL813", _variables(part.env)
        case Executor():
            commands = [("command", argument) for argument in argv(part.container)]
            code, values = "SL814", [*_variables(list_at(part.container, "env")), *commands]
    for name, value in values:
        if kind := kind_of(name, value):
            yield code, f"{name} holds {kind}"


def _variables(env: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(str(item.get("name", "")), item.get("value")) for item in env]
