"""The processes that write: started early, given their jobs when these are known.

A process that writes: it takes jobs as lines of JSON on its standard input, and answers likewise.

Not multiprocessing: its new processes run the user's own main module again, and a parent that has loaded
TensorFlow must not be forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardline.components.preprocess import plan_file
from shardline.components.preprocess.survey import check_bucket
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.preprocess.write import ShardWriter
from shardline.trainer import errors
from shardline.trainer.errors import BadRecordError, RunError, ShardlineError

_INTERVAL_SECONDS = 0.2


class _Progress:
    """Tells the parent of progress, not too often."""

    def __init__(self) -> None:
        self._records = self._bytes = 0
        self._reported = time.monotonic()

    def __call__(self, records: int, size: int) -> None:
        self._records += records
        self._bytes += size
        if time.monotonic() - self._reported >= _INTERVAL_SECONDS:
            self.flush()

    def flush(self) -> None:
        _answer({"records": self._records, "bytes": self._bytes})
        self._records = self._bytes = 0
        self._reported = time.monotonic()


def do(job: Mapping[str, Any], report: Any) -> None:
    """Does one job: writes the shards, or checks the buckets, that it names."""
    work = WorkDirectory(Path(job["out"]))
    plan = plan_file.load(work.plan)
    if job["kind"] == "check":
        for bucket in job["items"]:
            check_bucket(plan, work, work.buckets / bucket, report)
        return
    wanted = set(job["items"])
    with ShardWriter(plan, work, report) as writer:
        for shard in plan.shards:
            if shard.file in wanted:
                writer.write(shard)


def to_json(error: ShardlineError) -> dict[str, Any]:
    """Returns an error as it is sent to another process."""
    values = [error.name, error.reason] if isinstance(error, BadRecordError) else [str(error)]
    return {"error": type(error).__name__, "values": values}


def from_json(answer: Mapping[str, Any]) -> ShardlineError:
    """Returns an error that another process has sent."""
    error: ShardlineError = getattr(errors, answer["error"])(*answer["values"])
    return error


def main() -> None:
    """Does jobs until the standard input ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for line in sys.stdin:
        report = _Progress()
        try:
            do(json.loads(line), report)
        except ShardlineError as error:
            _answer(to_json(error))
            return
        report.flush()
        _answer({"done": True})


def _answer(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


# For a process that was told to end: it removes what it had not finished.
_PATIENCE_SECONDS = 10.0

_WORKER = (sys.executable, "-m", "shardline.components.preprocess.pool")


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
                do({"kind": kind, "out": str(out), "items": shares[0]}, report_own)
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
            raise from_json(answer)
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


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):  # the parent has gone, or is going
        sys.exit(1)
