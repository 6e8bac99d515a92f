"""Starts the replicas of a cluster as processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers import programs

ROOT = Path(__file__).resolve().parents[2]


def free_ports(count: int) -> list[int]:
    """Returns ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def tf_configs(replicas: int, *, chief: bool = True) -> list[dict[str, object]]:
    """Returns TF_CONFIG of each replica, with a chief task or with workers only."""
    hosts = [f"127.0.0.1:{port}" for port in free_ports(replicas)]
    cluster = {"chief": hosts[:1], "worker": hosts[1:]} if chief else {"worker": hosts}
    tasks = [{"type": kind, "index": i} for kind in cluster for i in range(len(cluster[kind]))]
    return [{"cluster": cluster, "task": task} for task in tasks]


def start(
    arguments: Sequence[str], replicas: int, *, chief: bool = True, environ: Mapping[str, str] | None = None
) -> list[programs.Popen]:
    """Starts `python ARGUMENTS` once per replica; one replica gets no TF_CONFIG."""
    return [
        start_one(arguments, config if replicas > 1 else None, environ)
        for config in tf_configs(replicas, chief=chief)
    ]


def proxied_environ() -> dict[str, str]:
    """Returns this process's environment with its proxy, which does not answer, also for loopback."""
    return {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}


def start_one(
    arguments: Sequence[str], config: Mapping[str, object] | None, environ: Mapping[str, str] | None = None
) -> programs.Popen:
    """Starts `python ARGUMENTS` with that TF_CONFIG, or without one."""
    extra = {"TF_CONFIG": json.dumps(config)} if config else {}
    return programs.Popen(
        [sys.executable, *arguments],
        env={**proxied_environ(), "PYTHONPATH": str(ROOT), **extra, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def finish(processes: Sequence[programs.Popen], seconds: float = 180) -> tuple[list[int], list[str]]:
    """Returns exit codes and outputs."""
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    print(*outputs, sep="\n" + "-" * 80 + "\n")  # which pytest shows in full where the test fails
    return [process.returncode for process in processes], outputs


def run(arguments: Sequence[str], replicas: int, **options: object) -> list[str]:
    """Runs the replicas to their end and returns their outputs; fails the test when one fails."""
    codes, outputs = finish(start(arguments, replicas, **options), 240)  # type: ignore[arg-type]
    for code, output in zip(codes, outputs, strict=True):
        assert code == 0, output[-5000:]
    return outputs
