"""End of a run: its outcome is recorded, and sent to a webhook."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shardline.components.model_store.catalog import champion_directory
from shardline.components.runs.causes import Failure, explain
from shardline.components.runs.directory import read_local_record
from shardline.components.runs.logs import read_platform_record
from shardline.components.runs.record import FAILED, RUN_VARIABLE, SUCCEEDED, RunRecord, State
from shardline.components.vertex.client import Platform, read_secret, retry_policy
from shardline.components.vertex.forms import SECRET
from shardline.trainer.base.errors import PlatformError, SettingsError, ShardlineError
from shardline.trainer.base.progress import report

TOPIC = "conclude"
#: Environment variable with the webhook's URL in a run on this machine.
WEBHOOK_VARIABLE = "SHARDLINE_WEBHOOK"
WHEN = ("failure", "always", "never")

#: Slack takes 3,000 characters in a block.
_MAX_BLOCK, _MAX_LOG = 2900, 2800
_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class NotifySettings:
    """The notification at the end of a run, [notify]; settings/vertex.toml.example explains the fields.

    The webhook's URL is a secret and not among them: without `webhook_secret` it is the environment variable
    SHARDLINE_WEBHOOK, which only tasks of a run on this machine have.
    """

    when: str = "failure"
    webhook_secret: str = ""
    emails: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.when not in WHEN:
            raise SettingsError(f"when must be one of {', '.join(WHEN)}, got {self.when!r}")
        if self.webhook_secret and not SECRET.fits(self.webhook_secret):
            # Not repeated in the message: it may be the URL itself.
            raise SettingsError(
                f"webhook_secret must be {SECRET.description} that holds the URL, not the URL"
            )
        if self.emails and self.webhook_secret:
            raise SettingsError("emails and webhook_secret exclude each other: a run has one exit handler")
        for address in self.emails:
            if not re.fullmatch(r"[^@\s]+@[^@\s]+", address):
                raise SettingsError(f"emails must be e-mail addresses, got {address!r}")


def payload(run: RunRecord) -> dict[str, Any]:
    """Returns a message in the form of Slack's incoming webhooks, which Mattermost and others take too.

    Source: https://api.slack.com/messaging/webhooks
    """
    rows = [("run", run.name), *run.links.items()]
    lines: tuple[str, ...] = ()
    if run.explanation is not None:
        rows, lines = [*run.explanation.rows(), *rows], run.explanation.lines
    body = "\n".join(f"*{_escaped(name)}*  {_escaped(value)}" for name, value in rows)
    texts = [f"*{_escaped(run.headline())}*", body]
    if lines:
        texts.append(f"```{_escaped(chr(10).join(lines))[-_MAX_LOG:]}```")
    blocks = [{"type": "section", "text": {"type": "mrkdwn", "text": text[:_MAX_BLOCK]}} for text in texts]
    return {"text": run.headline(), "blocks": blocks}


def webhook_url(secret: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the webhook's URL, which is a secret: no output and no error shows it.

    `secret` is its name in Secret Manager; "" for the variable SHARDLINE_WEBHOOK. Returns "" without both.

    Raises:
        PlatformError: When Secret Manager refuses, or is not reached.
        SettingsError: When the secret holds no URL.
    """
    url = read_secret(secret) if secret else environ.get(WEBHOOK_VARIABLE, "").strip()
    if url and not re.fullmatch(r"https://\S+|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?(/\S*)?", url):
        raise SettingsError(
            f"{secret or WEBHOOK_VARIABLE} does not hold a URL that begins with https:// (http:// is for "
            "this machine alone)"
        )
    return url


def send(url: str, message: Mapping[str, Any]) -> None:
    """Posts a message, with retries for a minute where the webhook is busy or not reached.

    Raises PlatformError without the URL, which the errors of requests contain.
    """
    import requests

    def post() -> None:
        response = requests.post(url, json=message, timeout=_TIMEOUT_S, allow_redirects=False)
        if not response.ok or response.is_redirect:
            raise requests.HTTPError(response=response)

    try:
        return retry_policy("call the webhook")(post)()
    except requests.RequestException as error:
        answer = error.response
        reason = type(error).__name__ if answer is None else f"status {answer.status_code}"
    raise PlatformError(f"the webhook refused the message ({reason})") from None


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def conclude_run(
    *,
    state: str,
    error: str,
    job_name: str,
    job_resource_name: str,
    project: str,
    history_uri: str,
    notify_when: str,
    webhook_secret: str,
) -> None:
    """Records the outcome of a run, explains a failure, and sends a notification.

    Errors on the way are reported, not raised. The arguments are those of `conclude`; `state` and `error` are
    the outcome of the tasks inside the exit handler.
    """
    run = _read_outcome(cast(State, state.lower()), error, job_name, job_resource_name, project)
    if run.explanation is not None:
        for name, value in run.explanation.rows():
            report(TOPIC, f"{name}: {value}")
        for line in run.explanation.lines:
            report(TOPIC, f"| {line}")
    if history_uri:
        try:
            run.write(champion_directory(history_uri) / "runs" / Path(job_name).name)
        except (OSError, ShardlineError) as failure:
            report(TOPIC, f"cannot write the record of this run to {history_uri}: {failure}")
    # A cancelled run counts as a failure.
    if notify_when == "always" or (notify_when == "failure" and run.state != SUCCEEDED):
        try:
            if url := webhook_url(webhook_secret):
                send(url, payload(run))
                report(TOPIC, "the webhook has been called")
        except ShardlineError as failure:
            report(TOPIC, f"no notification was sent: {failure}")


def _read_outcome(state: State, error: str, job_name: str, job_resource_name: str, project: str) -> RunRecord:
    try:
        if here := os.environ.get(RUN_VARIABLE):
            return read_local_record(Path(here), state)
        platform = Platform.of_resource(job_resource_name, project=project)
        return read_platform_record(platform, job_resource_name, state)
    except Exception as failure:  # of files, clients or credentials; recording and notifying go on
        what = "" if isinstance(failure, ShardlineError) else f"{type(failure).__name__}: "
        report(TOPIC, f"cannot read how the run ended: {what}{' '.join(str(failure).split())}")
    error = " ".join(error.split())
    explanation = explain(Failure(error=error)) if state == FAILED else None
    return RunRecord(
        name=job_name, pipeline=job_name, state=state, error=error or None, explanation=explanation
    )
