"""Formats of the texts in the platform's requests: names, labels, durations, placeholders.

Settings, the requests made from them, and the checks of a pipeline all use these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from shardline.trainer.base.errors import SettingsError

#: Placeholders `{{$.NAME}}` that the platform fills in when a task starts.
PLACEHOLDERS = (
    "pipeline_job_name",
    "pipeline_job_uuid",
    "pipeline_job_resource_name",
    "pipeline_job_create_time_utc",
    "pipeline_job_schedule_time_utc",
    "pipeline_task_name",
    "pipeline_task_uuid",
    "pipeline_google_cloud_project_id",
    "pipeline_google_cloud_location",
    "pipeline_service_account",
    "pipeline_network",
    "pipeline_encryption_key_name",
    "pipeline_persistent_resource_id",
)
_KNOWN = re.compile(r"\{\{\$\.(" + "|".join(PLACEHOLDERS) + r")\}\}")
#: How the platform's placeholders begin, and those that KFP's compiler replaces.
_BEGINS = re.compile(r"\{\{(\$|channel:)")
_BREAKS_JSON = re.compile(r'["\\\x00-\x1f\x7f]')


class Form(NamedTuple):
    """Format of a text: a regular expression for the whole text, and a description for messages."""

    pattern: str
    description: str

    def match(self, text: str) -> re.Match[str] | None:
        """Returns the match of the whole text, or None."""
        return re.fullmatch(self.pattern, text)

    def fits(self, text: str) -> bool:
        """Whether a text has the format."""
        return self.match(text) is not None


PROJECT = Form(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]|\d+", "a project id such as my-project")
LOCATION = Form(r"[a-z]+-[a-z]+\d+", "a region such as europe-west4")
#: A path with a space at its end is a mistake.
BUCKET_PATH = Form(r"gs://[^/\s]+(/|/.*\S)?", "gs://BUCKET/PATH")
#: google.cloud.aiplatform_v1.types.CustomJobSpec: "{project} is a project number".
NETWORK = Form(r"projects/\d+/global/networks/[a-z0-9-]+", "projects/NUMBER/global/networks/NAME")
ENCRYPTION_KEY = Form(
    r"projects/[^/\s]+/locations/[^/\s]+/keyRings/[^/\s]+/cryptoKeys/[^/\s]+",
    "projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY",
)
TENSORBOARD = Form(
    r"projects/[^/\s]+/locations/[^/\s]+/tensorboards/[^/\s]+",
    "projects/PROJECT/locations/LOCATION/tensorboards/ID",
)
SERVICE_ACCOUNT = Form(r"[^@\s]+@[^@\s]+\.[^@\s]+", "the e-mail address of a service account")
PERSISTENT_RESOURCE = Form(r"[a-z]([a-z0-9-]*[a-z0-9])?", "the resource's id, not its full name")
MODEL = Form(
    r"projects/[\w:.-]+/locations/([a-z0-9-]+)/models/[\w-]+",
    "projects/P/locations/L/models/ID, without a version",
)
SECRET = Form(
    r"projects/[^/]+/secrets/[\w-]+/versions/(\d+|latest|[A-Za-z][\w-]*)",
    "projects/PROJECT/secrets/NAME/versions/latest, the name of a secret in Secret Manager",
)
MACHINE_TYPE = Form(r"[a-z][a-z0-9]*(-[a-z0-9]+)+", "a Compute Engine machine type as in n1-standard-8")
#: google.cloud.aiplatform_v1.types.EnvVar: "Must be a valid C identifier".
VARIABLE = Form(r"[A-Za-z_][A-Za-z0-9_]*", "a name of an environment variable")
PLATFORM_VARIABLE = Form(r"TF_CONFIG|CLUSTER_SPEC|(AIP|CLOUD_ML)_\w+", "a variable that the platform sets")
#: google.cloud.aiplatform_v1.types.CreatePipelineJobRequest.pipeline_job_id: less than 128 characters.
JOB_ID = Form(
    r"[a-z][-a-z0-9]{0,126}",
    "127 lower-case letters, digits and - at most, beginning with a letter",
)
#: google_cloud_pipeline_components, CustomTrainingJobOp: "A duration in seconds with up to nine fractional
#: digits, terminated by 's'".
DURATION = Form(r"\d+(\.\d{1,9})?s", "seconds and an 's', as in '3600s'")
#: docs.cloud.google.com, resource-manager/docs/labels-overview (goo.gl/xmQnxf in the API's reference):
#: letters of all alphabets, none of them upper case, and 63 characters at most; only values may be empty.
LABEL_KEY = Form(r"[^\W\d_][\w-]{0,62}", "1 to 63 lower-case letters, digits, '_' and '-', a letter first")
LABEL_VALUE = Form(r"[\w-]{0,63}", "at most 63 lower-case letters, digits, '_' and '-'")

MAX_LABELS = 64
#: google.cloud.aiplatform_v1.types.ContainerSpec: env, "Maximum limit is 100".
MAX_VARIABLES = 100
#: Characters of the display_name of any resource.
MAX_DISPLAY_NAME = 128


def check_labels(labels: Mapping[str, str], origin: str = "") -> None:
    """Checks tags, which the API calls labels, as it does; `origin` ends the message, " (from --tag)".

    Raises:
        SettingsError: When there are too many, or a key or value has characters that are not allowed.
    """
    if len(labels) > MAX_LABELS:
        raise SettingsError(f"tags: there are at most {MAX_LABELS}, got {len(labels)}{origin}")
    for key, value in labels.items():
        if key != key.lower() or not LABEL_KEY.fits(key):
            raise SettingsError(f"tags: a key is {LABEL_KEY.description}, got {key!r}{origin}")
        if value != value.lower() or not LABEL_VALUE.fits(value):
            raise SettingsError(f"tags.{key}: a value is {LABEL_VALUE.description}, got {value!r}{origin}")


def seconds(duration: str) -> float | None:
    """Returns the seconds of a duration as the API writes it, "3600s"; None for any other text."""
    return float(duration[:-1]) if DURATION.fits(duration) else None


def check_accelerators(accelerator_type: str, accelerator_count: int) -> None:
    """Raises SettingsError for an accelerator type without a count, and a count without a type."""
    if accelerator_count < 0 or bool(accelerator_type) != (accelerator_count > 0):
        raise SettingsError(
            f"accelerator_type and accelerator_count go together, got {accelerator_type!r} and "
            f"{accelerator_count}"
        )


def check_text(name: str, text: str) -> None:
    """Checks a text that is a JSON value by itself: it arrives intact unless it has unknown placeholders.

    Raises:
        SettingsError: When the platform would replace a part of the text or fail on it; `name` says which.
    """
    if "\0" in text:
        raise SettingsError(f"{name} holds a NUL character, which no container can receive; leave it out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SettingsError(f"{name} is not valid UTF-8: {text!r}") from None
    if match := _BEGINS.search(_KNOWN.sub("", text)):
        raise SettingsError(
            f"{name} holds {match.group()!r}, which begins an unknown placeholder: {text!r}; "
            f"known are {', '.join('{{$.' + known + '}}' for known in PLACEHOLDERS)}"
        )


def check_pasted_text(name: str, text: str, form: Form | None = None) -> None:
    """Checks a text that the launcher's payload pastes between quotes, without escaping it.

    A placeholder may replace any number in the format.

    Raises:
        SettingsError: When the payload would not be JSON, the format is wrong, or as `check_text`.
    """
    check_text(name, text)
    if match := _BREAKS_JSON.search(text):
        raise SettingsError(
            f"{name} holds {match.group()!r}, which breaks the payload of the launcher: {text!r}; "
            "leave it out"
        )
    if form and text and not _KNOWN.fullmatch(text) and not form.fits(_KNOWN.sub("0", text)):
        raise SettingsError(f"{name} must be {form.description}, got {text!r}")
