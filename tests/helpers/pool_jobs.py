"""Jobs for the process pool of preprocessing whose workers come to grief."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from shardline.components.preprocess.process_pool import Report


def grieve(arguments: Mapping[str, Any], items: Iterable[str], report: Report) -> dict[str, Any]:
    """Takes two items in the parent, and fails in a worker as `arguments` says."""
    if os.getpid() == arguments["parent"]:
        return dict.fromkeys(islice(items, 2), os.getpid())
    how = arguments["how"]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(0)
    if how == "exit, its output held open":
        subprocess.Popen(["sleep", "60"])
        os._exit(0)
    if how == "printing":
        print("a line of a library")
    if how == "unforeseen":
        raise ValueError("of an unforeseen kind")
    return dict.fromkeys(items, os.getpid())
