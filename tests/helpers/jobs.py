"""Custom jobs whose replicas are plain Python scripts."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import psutil

from shardline.components.custom_job import PoolSpec
from shardline.pipelines.local.job import CustomJob

#: What every replica's program starts with.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from shardline.trainer.base import progress
from shardline.trainer.base.errors import EXIT_RESTART, ModelError
task = json.loads(os.environ["CLUSTER_SPEC"])["task"]
chief = task["type"] == "workerpool0"
name = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}[
    task["type"]
] + f"-{task['index']}"

def start_number(directory):
    "Says which start of this replica this is, from 1."
    with Path(directory, name + ".starts").open("a+") as file:
        file.write("x")
        return file.tell()

def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.01)
"""


def pool(*command: str, replica_count: int = 1, machine_spec: Any = None, **container: Any) -> PoolSpec:
    """Returns a worker pool whose replicas run a command."""
    content = {"command": list(command), **container}
    return PoolSpec(
        {"machine_spec": machine_spec or {}, "replica_count": replica_count, "container_spec": content}
    )


def make_job(
    program: str, *, workers: int = 1, ps: int = 0, evaluator: bool = False, **settings: Any
) -> CustomJob:
    """Returns a job whose replicas run a Python program; PRELUDE goes before it."""
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program)]
    return CustomJob.with_roles(command, 1 + workers, ps=ps, evaluator=evaluator, **settings)


def marked(mark: str) -> list[psutil.Process]:
    """Processes that are alive and have the mark: they inherit TEST_MARK from the test."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.environ().get("TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if alive and process.pid != os.getpid():
            found.append(process)
    return found


def eventually(condition: Callable[[], Any], seconds: float = 20) -> Any:
    """Waits until the condition holds, and fails the test when it never does."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value
