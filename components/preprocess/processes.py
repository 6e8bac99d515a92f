"""The processes that write: started early, given their jobs when these are known."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardline.components.preprocess import worker
from shardline.trainer.errors import RunError

# For a process that was told to end: it removes what it had not finished.
_PATIENCE_SECONDS = 10.0

_WORKER = (sys.executable, "-m", "shardline.components.preprocess.worker")


class Processes:
    """This process and those that help it. A context manager.

    They start at once, so that they are ready when the survey is.

    Args:
        count: How many write at the same time, this one among them.
    """

    def __init__(self, count: int) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._workers = [
            subprocess.Popen(
                _WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
            )
            for _ in range(count - 1)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._workers:
            if error is not None:
                each.terminate()
            for stream in (each.stdin, each.stdout):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()
        for each in self._workers:
            try:
                each.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()

    def do(self, kind: str, out: Path, items: Sequence[str], report: Callable[[int, int], None]) -> None:
        """Has all items done.

        Args:
            kind: "write" or "check".
            out: The dataset directory.
            items: Names of shards or buckets, the longest first.
            report: Told of progress: records and bytes since the last call.

        Raises:
            ShardlineError: What the first process that failed had to say.
            RunError: A process ended without a word.
        """
        shares = [items[number :: len(self._workers) + 1] for number in range(len(self._workers) + 1)]
        with selectors.DefaultSelector() as selector:
            for each, share in zip(self._workers, shares[1:], strict=True):
                if share:
                    _send(each, json.dumps({"kind": kind, "out": str(out.absolute()), "items": share}))
                    selector.register(_stream(each), selectors.EVENT_READ, [each, b""])

            def listen(timeout: float | None) -> None:
                for key, _ in selector.select(timeout):
                    if _receive(key.data, report):
                        selector.unregister(key.fileobj)

            def report_own(records: int, size: int) -> None:
                report(records, size)
                listen(0)

            if shares[0]:
                worker.do({"kind": kind, "out": str(out), "items": shares[0]}, report_own)
            while selector.get_map():
                listen(None)


def _receive(state: list[Any], report: Callable[[int, int], None]) -> bool:
    """Takes what a process has to say, and returns whether it has done its job."""
    process, rest = state
    block = os.read(_stream(process), 1 << 16)
    if not block:
        process.wait()
        raise RunError(
            f"a writing process ended with status {process.returncode}; run again, it will go on from there"
        )
    *lines, state[1] = (rest + block).split(b"\n")
    for line in lines:
        answer = json.loads(line)
        if "error" in answer:
            raise worker.from_json(answer)
        if "done" in answer:
            return True
        report(answer["records"], answer["bytes"])
    return False


def _send(process: subprocess.Popen[bytes], job: str) -> None:
    assert process.stdin is not None
    # A process that has ended says so when it is read from.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(job.encode() + b"\n")


def _stream(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return process.stdout.fileno()
