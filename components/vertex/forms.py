"""Texts in a custom job: what reaches the API as it was written, and what is refused."""

from __future__ import annotations

import re

from shardline.trainer.errors import SettingsError

#: What the platform knows of the pipeline, as `{{$.NAME}}`, and fills in when a task starts.
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


def check_text(name: str, text: str) -> None:
    """Checks a text that travels as a JSON value of its own: all but unknown placeholders arrive intact.

    Args:
        name: What the text is called in the settings.
        text: The text.

    Raises:
        SettingsError: When the platform would replace a part of it or fail on it.
    """
    if "\0" in text:
        raise SettingsError(f"{name} holds a NUL character, which no container can be given")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SettingsError(f"{name} is not valid UTF-8: {text!r}") from None
    if found := _BEGINS.search(_KNOWN.sub("", text)):
        raise SettingsError(
            f"{name} holds {found.group()!r}, which begins a placeholder that is not known: {text!r}; "
            f"there are {', '.join('{{$.' + known + '}}' for known in PLACEHOLDERS)}"
        )


def resolved(text: str) -> str | None:
    """Returns the text with "0" for each placeholder; None for a text that is one placeholder."""
    return None if _KNOWN.fullmatch(text) else _KNOWN.sub("0", text)


def check_pasted_text(name: str, text: str) -> None:
    """Checks a text that the launcher's payload pastes between quotes, without escaping it.

    Raises:
        SettingsError: When the payload would no longer be JSON, or as `check_text` does.
    """
    check_text(name, text)
    if found := _BREAKS_JSON.search(text):
        raise SettingsError(
            f"{name} holds {found.group()!r}, which breaks the payload of the launcher: {text!r}; "
            "leave it out"
        )
