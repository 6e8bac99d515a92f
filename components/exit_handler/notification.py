"""End of a run: its outcome is recorded, and sent to a webhook."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from shardline.components.custom_job import SECRET
from shardline.components.model_store.champions import open_directory
from shardline.components.runs import Run, RunDirectory, RunState, VertexRun, explain, log_run
from shardline.components.vertex import Platform, call_within, read_secret
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import read_dataclass, restore_integers
from shardline.trainer.base.errors import PlatformError, SettingsError, ShardlineError
from shardline.trainer.base.progress import report

TOPIC = "exit-handler"

#: Attempts to call the webhook, seconds that each may take, and seconds between two.
_TRIES, _TIMEOUT_S, _PAUSE_S = 3, 10.0, 2.0
#: Characters of the message, and of the lines of the log in it: Google Chat takes 32,000 bytes.
_MAX_TEXT, _MAX_LOG = 4000, 2800


@dataclass(frozen=True, kw_only=True)
class NotifySettings:
    """The notification at the end of a run, [notify]; settings/vertex.toml.example explains the fields.

    The webhook's URL is a secret, of which only the name is there.
    """

    when: Literal["failure", "always", "never"] = "failure"
    webhook_secret: str = ""
    emails: tuple[str, ...] = ()

    def __post_init__(self) -> None:
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


def format_message(run: Run) -> str:
    """Returns the text about a run, in the marks that Slack and Google Chat have in common."""
    failure = run.explanation
    rows = [*run.rows(), ("run", run.name), *run.links.items()]
    body = "\n".join(f"*{name}*  {value}" for name, value in rows)
    lines = "\n".join(failure.lines)[-_MAX_LOG:] if failure else ""
    text = f"*{run.headline()}*\n{body}"[: _MAX_TEXT - len(lines)] + (f"\n```{lines}```" if lines else "")
    return text.replace("<", "\u2039")  # <!channel> and <users/all> would notify everyone


def webhook_url(secret: str) -> str:
    """Returns the webhook's URL from Secret Manager; no output and no error shows it.

    Raises:
        PlatformError: When Secret Manager refuses, or is not reached.
        SettingsError: When the secret holds no URL.
    """
    url = read_secret(secret)
    if not re.fullmatch(r"https://\S+|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?(/\S*)?", url):
        raise SettingsError(
            f"{secret} does not hold a URL that begins with https:// (http:// is for this machine alone)"
        )
    return url


def post_message(url: str, text: str) -> None:
    """Posts a message, three times where the webhook does not take it; its answer is not read.

    Raises PlatformError without the URL, which the errors of requests contain.
    """
    import requests

    def post() -> int:
        answer = requests.post(
            url, json={"text": text}, timeout=_TIMEOUT_S, allow_redirects=False, proxies=proxies, stream=True
        )
        with answer:
            return int(answer.status_code)

    logging.getLogger("urllib3").setLevel(logging.CRITICAL)  # warns of answers with their URL
    # Of this machine (`webhook_url`), which a proxy does not know.
    proxies = {"no_proxy": urlsplit(url).hostname or ""} if url.startswith("http:") else None
    for number in range(_TRIES):
        time.sleep(_PAUSE_S if number else 0)
        try:
            status = call_within(_TIMEOUT_S, post)
            if status < 300:
                return
            reason = f"status {status}"
        except (requests.RequestException, TimeoutError) as error:
            reason = type(error).__name__
    raise PlatformError(f"the webhook did not take the message ({reason})")


def finish_run(
    *,
    state: str,
    error: str,
    job_name: str,
    job_resource_name: str,
    project: str,
    history_uri: str,
    notify: Mapping[str, Any],
) -> None:
    """Records the outcome of a run, explains a failure, and sends a notification.

    Errors on the way are reported, not raised. The arguments are those of `exit_handler`; `state` and `error`
    are the outcome of the tasks inside it.
    """
    run = _read_outcome(cast(RunState, state.lower()), error, job_name, job_resource_name, project)
    if run.explanation is not None:
        for name, value in run.explanation.rows():
            report(TOPIC, f"{name}: {value}")
        for line in run.explanation.lines:
            report(TOPIC, f"| {line}")
    if history_uri:
        try:
            history = open_directory(history_uri, "history_uri", "the run is not recorded")
            name = f"runs/{Path(job_name).name}/run.json"
            history.replace(name, files.to_json(run.record(), name))
        except (OSError, ShardlineError) as failure:
            report(TOPIC, f"cannot write the record of this run to {history_uri}: {failure}")
    settings = read_dataclass(NotifySettings, restore_integers(notify), "notify")
    # A cancelled run counts as a failure.
    is_due = settings.when == "always" or (settings.when == "failure" and run.state != "succeeded")
    if is_due and settings.webhook_secret:
        _notify(run, settings.webhook_secret)
    log_run(job_name, run)  # last: it may wait for the server


def _notify(run: Run, secret: str) -> None:
    try:
        post_message(webhook_url(secret), format_message(run))
        report(TOPIC, "the webhook has been notified")
    except Exception as failure:  # the text of any but our own may hold the URL
        why = failure.line if isinstance(failure, ShardlineError) else type(failure).__name__
        report(TOPIC, f"no notification was sent to the webhook: {why}")


def _read_outcome(state: RunState, error: str, job_name: str, job_resource_name: str, project: str) -> Run:
    try:
        run: RunDirectory | VertexRun | None = None
        if here := os.environ.get(RunDirectory.VARIABLE):
            run = RunDirectory(Path(here))
        elif job_resource_name:
            run = VertexRun(Platform.of_resource(job_resource_name, project=project), job_resource_name)
        if run:
            return run.explain(replace(run.read(), state=state))
    except Exception as failure:  # of files, clients or credentials; recording and notifying go on
        what = "" if isinstance(failure, ShardlineError) else f"{type(failure).__name__}: "
        report(TOPIC, f"cannot read how the run ended: {what}{' '.join(str(failure).split())}")
    error = " ".join(error.split())
    explanation = explain(error=error) if state == "failed" else None
    return Run(name=job_name, pipeline=job_name, state=state, error=error or None, explanation=explanation)
