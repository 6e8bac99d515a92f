"""Conclusion of a run: what became of it is read, recorded, and sent to whoever wants to know."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from shardline.components.conclude import notification
from shardline.components.model_store.catalog import champion_directory
from shardline.components.run_directory import observe
from shardline.components.run_record import FAILED, RUN_VARIABLE, RunRecord, State
from shardline.components.vertex.causes import Failure, explain
from shardline.components.vertex.client import Platform
from shardline.components.vertex.logs import read_record
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

    Whatever goes wrong on the way is said and goes no further: the run is what it is. The arguments are those
    of `conclude`; `state` and `error` say how the tasks inside the exit handler came out.
    """
    run = _read(cast(State, state.lower()), error, job_name, job_resource_name, project)
    if run.explanation is not None:
        for name, value in run.explanation.rows():
            say(TOPIC, f"{name}: {value}")
        for line in run.explanation.lines:
            say(TOPIC, f"| {line}")
    if history_uri:
        try:
            run.write(champion_directory(history_uri) / "runs" / Path(job_name).name)
        except (OSError, ShardlineError) as failure:
            say(TOPIC, f"cannot write the record of this run to {history_uri}: {failure}")
    if notification.is_wanted(notify_when, run.state):
        try:
            if notification.notify(run, webhook_secret):
                say(TOPIC, "the webhook has been called")
        except ShardlineError as failure:
            say(TOPIC, f"no notification was sent: {failure}")


def _read(state: State, error: str, job_name: str, job_resource_name: str, project: str) -> RunRecord:
    try:
        if here := os.environ.get(RUN_VARIABLE):
            return observe(Path(here), state)
        platform = Platform.of(job_resource_name, project=project)
        return read_record(platform, job_resource_name, state)
    except Exception as failure:  # of files, clients and credentials; the rest of the work does not need them
        what = "" if isinstance(failure, ShardlineError) else f"{type(failure).__name__}: "
        say(TOPIC, f"cannot read how the run ended: {what}{_line(str(failure))}")
    explanation = explain(Failure(error=_line(error))) if state == FAILED else None
    return RunRecord(
        name=job_name, pipeline=job_name, state=state, error=_line(error) or None, explanation=explanation
    )


def _line(text: str) -> str:
    return " ".join(text.split())
