"""Conclusion of a run: what became of it is read, kept, and told."""

from __future__ import annotations

import os
from pathlib import Path

from shardline.components import run_record
from shardline.components.conclude import notification
from shardline.components.model_store import champion_directory
from shardline.components.run_record import Outcome
from shardline.components.vertex.causes import Failure, explain
from shardline.trainer.errors import ShardlineError
from shardline.trainer.progress import say

TOPIC = "conclude"


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
    """Records how a run came out, explains its failure, and tells whoever wants to know.

    Whatever goes wrong on the way is said and goes no further: the run is what it is.

    Args:
        state: Of the tasks inside the exit handler: SUCCEEDED, FAILED or CANCELLED.
        error: What the platform says of a failure.
        job_name: Name of the run.
        job_resource_name: The platform's name of it.
        project: Id of the project; "" for the number in that name.
        history_uri: Directory or gs:// of the record; "" for none.
        notify_when: failure, always or never.
        webhook_secret: Secret Manager's name of the webhook's URL; "" for SHARDLINE_WEBHOOK.
    """
    run = _read(state.lower(), error, job_name, job_resource_name, project)
    if run.failure is not None:
        _say_why(run)
    if history_uri:
        _record(run, history_uri, job_name)
    if notification.is_wanted(notify_when, run.state):
        _notify(run, webhook_secret)


def _read(state: str, error: str, job_name: str, job_resource_name: str, project: str) -> Outcome:
    here = os.environ.get(run_record.RUN_VARIABLE)
    try:
        if here:
            return run_record.read_outcome(Path(here), state)
        return _ask_platform(state, job_resource_name, project)
    except Exception as failure:  # of files, clients and credentials; the rest of the work does not need them
        say(TOPIC, f"cannot read what became of the run: {type(failure).__name__}: {_line(str(failure))}")
    failed = Failure(error=_line(error)) if state == run_record.FAILED else None
    return Outcome(name=job_name, pipeline=job_name, state=state, failure=failed)


def _ask_platform(state: str, job_resource_name: str, project: str) -> Outcome:
    from shardline.components.vertex import runs

    _, number, _, location, *_ = job_resource_name.split("/")
    source = runs.connect(project or number, location)
    return runs.read_outcome(job_resource_name, source, state, lambda text: say(TOPIC, text))


def _say_why(run: Outcome) -> None:
    assert run.failure is not None
    explanation = explain(run.failure)
    for name, value in explanation.rows():
        say(TOPIC, f"{name}: {value}")
    for line in explanation.lines:
        say(TOPIC, f"| {line}")


def _record(run: Outcome, history_uri: str, job_name: str) -> None:
    try:
        run.write(champion_directory(history_uri) / "runs" / job_name)
    except (OSError, ShardlineError) as error:
        say(TOPIC, f"cannot keep the record of this run under {history_uri}: {error}")


def _notify(run: Outcome, webhook_secret: str) -> None:
    try:
        url = notification.webhook_url(webhook_secret)
        if url:
            notification.send(url, notification.payload(run))
            say(TOPIC, "the webhook has been told")
    except ShardlineError as error:
        say(TOPIC, f"nobody has been told: {error}")


def _line(text: str) -> str:
    return " ".join(text.split())
