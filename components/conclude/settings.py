"""Who is told how a run came out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardline.trainer.errors import SettingsError

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
