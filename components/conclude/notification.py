"""End of a run: its outcome is recorded, and sent to a webhook and a topic of Pub/Sub."""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from shardline.components.model_store.catalog import champion_directory
from shardline.components.runs import tracked
from shardline.components.runs.causes import Failure, explain
from shardline.components.runs.directory import read_local_record
from shardline.components.runs.logs import read_platform_record
from shardline.components.runs.record import FAILED, RUN_VARIABLE, SUCCEEDED, RunRecord, State
from shardline.components.vertex.client import Platform, connect, platform_errors, read_secret, retry_policy
from shardline.components.vertex.forms import SECRET
from shardline.trainer.base.errors import PlatformError, SettingsError, ShardlineError
from shardline.trainer.base.progress import report

TOPIC = "conclude"
#: Environment variable with the webhook's URL in a run on this machine.
WEBHOOK_VARIABLE = "SHARDLINE_WEBHOOK"

#: Slack takes 3,000 characters in a block, Google Chat 32,000 bytes in all, four for a character.
_MAX_BLOCK, _MAX_LOG = 2900, 2800
_TIMEOUT_S = 20.0
#: Seconds of retries, which outlast a short outage.
_OUTAGE_S = 300.0
_TOPIC = re.compile(r"projects/[\w.:-]+/topics/(?!goog)[A-Za-z][\w.~+%-]{2,254}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class NotifySettings:
    """The notification at the end of a run, [notify]; settings/vertex.toml.example explains the fields.

    The webhook's URL is a secret and not among them: without `webhook_secret` it is the environment variable
    SHARDLINE_WEBHOOK, which only tasks of a run on this machine have.
    """

    when: Literal["failure", "always", "never"] = "failure"
    webhook_secret: str = ""
    form: Literal["", "slack", "chat", "json"] = ""
    topic: str = ""
    emails: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.webhook_secret and not SECRET.fits(self.webhook_secret):
            # Not repeated in the message: it may be the URL itself.
            raise SettingsError(
                f"webhook_secret must be {SECRET.description} that holds the URL, not the URL"
            )
        if self.topic and not _TOPIC.fullmatch(self.topic):
            raise SettingsError(f"topic must be projects/PROJECT/topics/TOPIC, got {self.topic!r}")
        for name in ("webhook_secret", "form", "topic"):
            if self.emails and getattr(self, name):
                raise SettingsError(f"emails and {name} exclude each other: a run has one exit handler")
        for address in self.emails:
            if not re.fullmatch(r"[^@\s]+@[^@\s]+", address):
                raise SettingsError(f"emails must be e-mail addresses, got {address!r}")


def payload(run: RunRecord, form: str = "slack") -> dict[str, Any]:
    """Returns the message about a run.

    "slack" is the form of Slack's incoming webhooks, which Mattermost and others take too, "chat" that of
    Google Chat, which refuses other keys, "json" an object of texts, which docs/reports.md explains.
    Sources: https://api.slack.com/messaging/webhooks,
    https://developers.google.com/workspace/chat/api/reference/rest/v1/spaces.messages
    """

    def escaped(text: str) -> str:  # Google Chat has no escape, and <users/all> would notify everyone
        return text.replace("<", "\u2039") if form == "chat" else html.escape(text, quote=False)

    failure = run.explanation
    lines = "\n".join(failure.lines) if failure else ""
    if form == "json":
        about = {"headline": run.headline(), "pipeline": run.pipeline, "run": run.name, "state": run.state}
        links = {f"link_{name}": link for name, link in run.links.items()}
        why = asdict(failure) if failure else {}
        return {**about, "verdict": run.verdict, **why, "lines": lines, **links}
    rows = [*(failure.rows() if failure else ()), ("run", run.name), *run.links.items()]
    body = "\n".join(f"*{escaped(name)}*  {escaped(value)}" for name, value in rows)
    texts = [f"*{escaped(run.headline())[:2000]}*", body[:_MAX_BLOCK]]
    if lines:
        texts.append(f"```{escaped(lines)[-_MAX_LOG:]}```")
    if form == "chat":
        return {"text": "\n".join(texts)}
    blocks = [{"type": "section", "text": {"type": "mrkdwn", "text": text}} for text in texts]
    return {"text": run.headline(), "blocks": blocks}


def webhook_url(secret: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the webhook's URL, which is a secret: no output and no error shows it.

    `secret` is its name in Secret Manager; "" for the variable SHARDLINE_WEBHOOK. Returns "" without both.

    Raises:
        PlatformError: When Secret Manager refuses, or is not reached.
        SettingsError: When the secret holds no URL.
    """
    url = read_secret(secret, _OUTAGE_S) if secret else environ.get(WEBHOOK_VARIABLE, "").strip()
    if url and not re.fullmatch(r"https://\S+|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?(/\S*)?", url):
        raise SettingsError(
            f"{secret or WEBHOOK_VARIABLE} does not hold a URL that begins with https:// (http:// is for "
            "this machine alone)"
        )
    return url


def send(url: str, message: Mapping[str, Any]) -> None:
    """Posts a message, with retries for five minutes where the webhook is busy or not reached.

    Raises PlatformError without the URL, which the errors of requests contain.
    """
    import requests

    def post() -> None:
        response = requests.post(url, json=message, timeout=_TIMEOUT_S, allow_redirects=False)
        if not response.ok or response.is_redirect:
            raise requests.HTTPError(response=response)

    try:
        return retry_policy("call the webhook", outage_s=_OUTAGE_S)(post)()
    except requests.RequestException as error:
        answer = error.response
        reason = type(error).__name__ if answer is None else f"status {answer.status_code}"
    raise PlatformError(f"the webhook did not take the message ({reason})") from None


def publish(topic: str, run: RunRecord) -> None:
    """Publishes the plain message about a run to a topic of Pub/Sub, with retries as `send`.

    Source: https://cloud.google.com/pubsub/docs/reference/rest/v1/projects.topics/publish
    """
    attributes = {"pipeline": run.pipeline, "run": run.name, "state": run.state}
    data = base64.b64encode(json.dumps(payload(run, "json")).encode()).decode()
    body = {"messages": [{"data": data, "attributes": attributes}]}
    rest, _ = connect(_OUTAGE_S)
    with platform_errors(f"publish to {topic}"):
        rest.request("pubsub", f"v1/{topic}:publish", body)


def conclude_run(
    *,
    state: str,
    error: str,
    job_name: str,
    job_resource_name: str,
    project: str,
    history_uri: str,
    notify: Mapping[str, Any],
) -> str:
    """Records the outcome of a run, explains a failure, and sends notifications.

    Errors on the way are reported, not raised. The arguments are those of `conclude`; `state` and `error` are
    the outcome of the tasks inside the exit handler. Returns a line "CHANNEL: WHY" for each that failed.
    """
    run = _read_outcome(cast(State, state.lower()), error, job_name, job_resource_name, project)
    if run.explanation is not None:
        for name, value in run.explanation.rows():
            report(TOPIC, f"{name}: {value}")
        for line in run.explanation.lines:
            report(TOPIC, f"| {line}")
    _record(run, history_uri, job_name)
    tracked.end(job_name, run)
    settings = NotifySettings(**notify)
    # A cancelled run counts as a failure.
    is_due = settings.when == "always" or (settings.when == "failure" and run.state != SUCCEEDED)
    if is_due and (undelivered := _notify(run, settings)):
        run = replace(run, undelivered=undelivered)
        _record(run, history_uri, job_name)
    return "\n".join(f"{channel}: {why}" for channel, why in run.undelivered.items())


def _record(run: RunRecord, history_uri: str, job_name: str) -> None:
    """Writes the record into the history, if there is one: before notifying too, which may take minutes."""
    if history_uri:
        try:
            run.write(champion_directory(history_uri) / "runs" / Path(job_name).name)
        except (OSError, ShardlineError) as failure:
            report(TOPIC, f"cannot write the record of this run to {history_uri}: {failure}")


def _notify(run: RunRecord, notify: NotifySettings) -> dict[str, str]:
    """Sends the notifications; returns why one did not arrive, by channel, without any secret."""
    undelivered = {}
    for channel in ("webhook", "topic"):
        try:
            if channel == "topic" and notify.topic:
                publish(notify.topic, run)
            elif channel == "webhook" and (url := webhook_url(notify.webhook_secret)):
                own = "chat" if url.startswith("https://chat.googleapis.com/") else "slack"
                send(url, payload(run, notify.form or own))
            else:
                continue
            report(TOPIC, f"the {channel} has been notified")
        except Exception as failure:  # the text of any but our own may hold the URL
            why = failure.line if isinstance(failure, ShardlineError) else type(failure).__name__
            undelivered[channel] = why
            report(TOPIC, f"no notification was sent to the {channel}: {why}")
    return undelivered


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
