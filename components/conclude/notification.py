"""The message that tells people how a run came out, and its way to a webhook.

Who is told how a run came out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.components import run_record
from shardline.components.run_record import Outcome
from shardline.components.vertex.causes import explain
from shardline.trainer.errors import PlatformError, SettingsError

#: Has the webhook's URL in a local run.
WEBHOOK_VARIABLE = "SHARDLINE_WEBHOOK"

#: Slack takes 3,000 characters in a block.
_LONGEST, _LONGEST_LOG = 2900, 2800
_TIMEOUT_S = 20.0


def is_wanted(when: str, state: str) -> bool:
    """Whether somebody wants to know; of the three, "failure" includes a run that was cancelled."""
    return when == "always" or (when == "failure" and state != run_record.SUCCEEDED)


def payload(run: Outcome) -> dict[str, Any]:
    """Returns a message in the form of Slack's incoming webhooks, which Mattermost and others take too.

    Source: https://api.slack.com/messaging/webhooks
    """
    rows = [("run", run.name), *run.links.items()]
    lines: tuple[str, ...] = ()
    if run.failure is not None:
        explanation = explain(run.failure)
        rows, lines = [*explanation.rows(), *rows], explanation.lines
    body = "\n".join(f"*{_escaped(name)}*  {_escaped(value)}" for name, value in rows)
    blocks = [_section(f"*{_escaped(run.headline())}*"), _section(body)]
    if lines:
        blocks.append(_section(f"```{_escaped(chr(10).join(lines))[-_LONGEST_LOG:]}```"))
    return {"text": run.headline(), "blocks": blocks}


def webhook_url(secret: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the webhook's URL, which is a secret: it is never printed, and stands in no error.

    Args:
        secret: Its name in Secret Manager; "" for the variable SHARDLINE_WEBHOOK.
        environ: Environment variables.

    Returns:
        "" where nobody has given one.

    Raises:
        PlatformError: When Secret Manager refuses or is not reached.
        SettingsError: When what it holds is no URL.
    """
    url = _access(secret) if secret else environ.get(WEBHOOK_VARIABLE, "").strip()
    if url and not re.fullmatch(r"https?://\S+", url):
        raise SettingsError(f"{secret or WEBHOOK_VARIABLE} does not hold a URL that begins with https://")
    return url


def send(url: str, message: Mapping[str, Any]) -> None:
    """Posts a message.

    Raises:
        PlatformError: When the webhook is not reached or does not take it. Without the URL, of which the
            errors of requests are full.
    """
    import requests

    try:
        response = requests.post(url, json=message, timeout=_TIMEOUT_S)
    except requests.RequestException as error:
        reason = type(error).__name__
    else:
        if response.ok:
            return
        reason = f"status {response.status_code}"
    raise PlatformError(f"the webhook did not take the message ({reason})") from None


def _access(secret: str) -> str:
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.secretmanager import SecretManagerServiceClient

    try:
        answer = SecretManagerServiceClient().access_secret_version(name=secret)
    except (GoogleAPIError, GoogleAuthError) as error:
        reason = " ".join(str(getattr(error, "message", "") or error).split())
        raise PlatformError(
            f"cannot read the secret {secret}: {reason}; the run's service account needs "
            "roles/secretmanager.secretAccessor on it"
        ) from None
    return str(answer.payload.data.decode()).strip()


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:_LONGEST]}}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


WHEN = ("failure", "always", "never")

_SECRET = re.compile(r"projects/[^/]+/secrets/[\w-]+/versions/(\d+|latest|[A-Za-z][\w-]*)")


@dataclass(frozen=True, kw_only=True)
class NotifySettings:
    """The notification at the end of a run. The webhook's URL itself is a secret and stands nowhere.

    Attributes:
        when: failure, always or never.
        webhook_secret: Secret Manager's name of the webhook's URL; "" for the variable SHARDLINE_WEBHOOK
            in the environment of the task, which only a local run has.
        emails: Recipients of the platform's own e-mail, which is sent however the run came out. It takes
            the place of the conclusion: a pipeline has one exit handler.
    """

    when: str = "failure"
    webhook_secret: str = ""
    emails: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.when not in WHEN:
            raise SettingsError(f"when must be one of {', '.join(WHEN)}, got {self.when!r}")
        if self.webhook_secret and not _SECRET.fullmatch(self.webhook_secret):
            # Not repeated in the message: it may be the URL itself.
            raise SettingsError(
                "webhook_secret must be projects/PROJECT/secrets/NAME/versions/latest, the name of a "
                "secret in Secret Manager that holds the URL, not the URL"
            )
        if self.emails and self.webhook_secret:
            raise SettingsError("emails and webhook_secret exclude each other: a run has one exit handler")
        for address in self.emails:
            if not re.fullmatch(r"[^@\s]+@[^@\s]+", address):
                raise SettingsError(f"emails must be e-mail addresses, got {address!r}")
