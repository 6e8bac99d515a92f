"""Tracking: what a run logs to an MLflow server, where MLFLOW_TRACKING_URI is set.

A thread speaks with the server, and nothing waits for it. A server that is away costs no run: it is tried
again for a minute, then reported once, and the rest is not logged.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardline.trainer.base import progress

#: Environment variables, MLflow's own: the server, and the run that open-source KFP has made for a pipeline.
URI_VARIABLE, RUN_VARIABLE = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"
#: Tags with the name of Shardline's run, by which its other tasks, and a continued run, find the MLflow run;
#: and, MLflow's own, with the id of the run in which a run is nested.
NAME_TAG, PARENT_TAG = "shardline.run", "mlflow.parentRunId"
#: Environment variable with the path of a Unix socket that passes on connections to the server: of a replica
#: whose job has no network.
SOCKET_VARIABLE = "SHARDLINE_TRACKING_SOCKET"
# Settings of MLflow's client, unless they are set: no output, and no retries of its own, which log lines.
# https://mlflow.org/docs/latest/api_reference/python_api/mlflow.environment_variables.html
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# Seconds for which a request is tried again, and then in which nobody tries: in this process, and in
# the others of a run on this machine, which see the time of a file in its directory.
_PATIENCE_S, _PAUSE_S = 60.0, 300.0
_DIRECTORY_VARIABLE, _AWAY_FILE = "SHARDLINE_RUN", ".mlflow-away"
# What MLflow takes in no name.
_OTHER = re.compile(r"[^\w/. -]")
# Time from which a server is tried again, by its address.
_away: dict[str, float] = {}
# Held while a run is looked for, and made where there is none.
_opening = threading.Lock()

_Action = Callable[[Any], Any]


class TrackedRun:
    """A run of MLflow that this process logs to, in a thread; no method raises, and `close` alone waits."""

    def __init__(self, uri: str, connect: Callable[[], tuple[Any, str]]) -> None:
        """Takes the address, and what returns a client and the id of the run; `open_run` makes one."""
        self._uri, self._client, self._id = uri, None, ""
        self._opened = threading.Event()
        self._closed = self._lost = self._refused = False
        self._error: object = ""  # the last one of a server that is away
        self._queue: queue.SimpleQueue[_Action | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(connect,), name="tracking", daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        """Id of the run in MLflow, for which it waits, but not in `call`; "" if the server is away."""
        self._opened.wait()
        return self._id

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Logs parameters; MLflow keeps the first value of each, and of a long one the beginning."""
        self._log("params", {name: str(value)[:6000] for name, value in values.items()})

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Logs finite metrics of a step, an epoch from 1, once; 0 is for those of the whole run."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._log("metrics", finite, int(time.time() * 1000), step)

    def tags(self, values: Mapping[str, str]) -> None:
        """Sets tags; of a long one the beginning."""
        self._log("tags", {name: str(value)[:8000] for name, value in values.items()})

    def file(self, path: Path, directory: str = "") -> None:
        """Uploads, before `close` returns, a file or a whole directory to a directory of the artifacts."""
        upload = "log_artifacts" if path.is_dir() else "log_artifact"
        self.call(lambda client: getattr(client, upload)(self._id, str(path), directory or None))

    def call(self, action: _Action) -> None:
        """Calls anything else with the client, as the methods above do, in the order of the calls."""
        if not self._lost:
            self._queue.put(action)

    def close(self, status: str = "", *, seconds: float = 30.0) -> None:
        """Waits until all is logged, or given up; ends the run as FINISHED, FAILED or KILLED, if named."""
        if status:
            self.call(lambda client: client.set_terminated(self._id, status))
        self._closed = True
        self._queue.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._give_up(f"{self._error or 'it is slow'}, not done within {seconds:g} s")

    def _log(self, kind: str, values: Mapping[str, Any], *more: int) -> None:
        """Logs records in a batch; MLflow refuses a batch as a whole, and then each is logged alone."""

        def log(client: Any) -> None:
            from mlflow.entities import Metric, Param, RunTag

            make = {"params": Param, "metrics": Metric, "tags": RunTag}[kind]
            known = client.get_run(self._id).data.params if kind == "params" else {}
            records = [
                make(key, values[name], *more)
                for name in values
                if (key := _OTHER.sub("_", name)[:250]) not in known
            ]
            # An epoch that was done again by a continued run, or a batch whose answer was lost.
            history = client.get_metric_history(self._id, records[0].key) if any(more[1:]) and records else ()
            if more[1:] and more[1] in [each.step for each in history]:
                return
            try:
                client.log_batch(self._id, **{kind: records})
            except Exception as error:
                if _is_away(error) or len(records) == 1:
                    raise
                for record in records:
                    self._attempt(methodcaller("log_batch", self._id, **{kind: [record]}))

        self.call(log)

    def _work(self, connect: Callable[[], tuple[Any, str]]) -> None:
        """Opens the run, then does what is in the queue until its end."""

        def open_first(_: Any) -> None:
            with _opening:
                self._client, self._id = connect()

        try:
            self._attempt(open_first)
            self._opened.set()
            self._lost |= not self._id  # it was refused
            while not self._lost and (action := self._queue.get()):
                self._attempt(action)
        except Exception as error:  # MLflow raises its own, and those of requests
            self._give_up(error)
        self._opened.set()

    def _attempt(self, action: _Action) -> None:
        """Does an action, again while the server is away; a refusal is reported, the first time."""
        began, pause = time.monotonic(), 0.5
        while True:
            try:
                action(self._client)
                return
            except Exception as error:
                if not _is_away(error):
                    if not self._refused:
                        _report(self._uri, error)
                    self._refused = True
                    return
                self._error = error
                if time.monotonic() - began > _PATIENCE_S or self._lost:
                    raise
            time.sleep(pause := min(2 * pause, 10.0))

    def _give_up(self, error: object) -> None:
        if not self._lost:
            self._lost, _away[self._uri] = True, time.monotonic() + _PAUSE_S
            if directory := os.environ.get(_DIRECTORY_VARIABLE):
                with contextlib.suppress(OSError):
                    Path(directory, _AWAY_FILE).touch()
            waiting = self._queue.qsize() + bool(self._id) - self._closed
            _report(self._uri, error, f"; {waiting} requests were not made")


def _is_away(error: Exception) -> bool:
    """Whether the server does not answer, or fails: the request may succeed later."""
    code = getattr(getattr(error, "response", None), "status_code", 0)  # of requests, in an upload
    status = getattr(error, "get_http_status_code", lambda: code)()
    return status >= 500 or status in (408, 429)


def _report(uri: str, error: object, rest: str = "") -> None:
    """Reports an error in one line, without the password of an address."""
    text = " ".join(str(error).rpartition("(Caused by ")[2].split())[:300]
    line = f"warning: cannot log to MLflow at {uri}: {text}{rest}; the run goes on"
    progress.report("tracking", re.sub(r"//[^/\s]*@", "//", line))


def open_run(
    name: str, *, child: str = "", fresh: bool = False, environ: Mapping[str, str] = os.environ
) -> TrackedRun | None:
    """Returns the MLflow run of a Shardline run, which is made where there is none; None without a server.

    Args:
        name: Name of Shardline's run; the same name finds the same run again; "" is no run, for `call` alone.
        child: Name of a run that is nested in it, such as "trial 3"; "" for the run itself.
        fresh: Whether to make a new one although there is one of this name.
        environ: Environment variables.
    """
    uri = environ.get(URI_VARIABLE, "")
    if not uri or _away.get(uri, 0.0) > time.monotonic():
        return None
    if directory := os.environ.get(_DIRECTORY_VARIABLE):
        with contextlib.suppress(OSError):  # there is no such file
            if time.time() - Path(directory, _AWAY_FILE).stat().st_mtime < _PAUSE_S:
                return None
    for variable, value in _DEFAULTS.items():
        os.environ.setdefault(variable, value)
    try:
        import mlflow  # noqa: F401  # here, where no other thread imports

        if path := environ.get(SOCKET_VARIABLE):
            _connect_through(path, server_address(uri))
    except ImportError as error:
        _away[uri] = math.inf
        _report(uri, f"{error}: pip install 'shardline[mlflow]'")
        return None
    return TrackedRun(uri, partial(_open, uri, name, child, fresh, dict(environ)))


def server_address(uri: str) -> tuple[str, int]:
    """Returns the host and port of a server; no host where an address names none."""
    try:
        url = urlsplit(uri)
        return url.hostname or "", url.port or {"https": 443}.get(url.scheme, 80)
    except ValueError:  # a port that is no number
        return "", 0


@functools.cache
def _connect_through(path: str, server: tuple[str, int]) -> None:
    """Lets this process connect to the server by the Unix socket of the process that has a network."""
    from urllib3.util import connection

    usual = connection.create_connection

    def connect(address: tuple[str, int], timeout: Any = None, *others: Any, **more: Any) -> socket.socket:
        if address != server:
            return usual(address, timeout, *others, **more)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20.0)
            client.connect(path)
            descriptors = socket.recv_fds(client, 1, 1)[1]
        if not descriptors:
            raise ConnectionRefusedError(f"{address[0]}:{address[1]} is not reached")
        passed = socket.socket(fileno=descriptors[0])
        passed.settimeout(timeout)
        return passed

    connection.create_connection = connect


def _open(uri: str, name: str, child: str, fresh: bool, environ: Mapping[str, str]) -> tuple[Any, str]:
    """Returns a client, and the id of the run that `open_run` describes."""
    from mlflow import MlflowClient
    from mlflow.tracking.context.registry import resolve_tags

    client = MlflowClient(uri)
    if not name:
        return client, "none"
    own = environ.get(RUN_VARIABLE, "")
    experiment = client.get_run(own).info.experiment_id if own else _experiment(client, environ)
    tags = {**resolve_tags(), NAME_TAG: name}  # with user, program and git revision, as MLflow's own runs
    if revision := environ.get("SHARDLINE_REVISION"):  # of the image, which has no git
        tags["mlflow.source.git.commit"] = revision

    def create(run_name: str) -> str:
        return str(client.create_run(experiment, tags=tags, run_name=run_name).info.run_id)

    run = own or ("" if fresh and not child else _find(client, experiment, name)) or create(name)
    if child:
        tags |= {NAME_TAG: f"{name}/{child}", PARENT_TAG: run}
        run = ("" if fresh else _find(client, experiment, tags[NAME_TAG])) or create(child)
    return client, run


def _experiment(client: Any, environ: Mapping[str, str]) -> str:
    """Returns the id of the experiment, MLflow's own default where none is named."""
    if named := environ.get("MLFLOW_EXPERIMENT_ID"):
        return named
    name = environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


def _find(client: Any, experiment: str, name: str) -> str:
    """Returns the id of the newest run of a name; "" for none."""
    quote = '"' if "'" in name else "'"  # nothing in it can be escaped
    found = client.search_runs([experiment], f"tags.`{NAME_TAG}` = {quote}{name}{quote}", max_results=1)
    return str(found[0].info.run_id) if found else ""
