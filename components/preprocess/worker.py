"""A process that writes: it takes jobs as lines of JSON on its standard input, and answers likewise.

Not multiprocessing: its new processes run the user's own main module again, and a parent that has loaded
TensorFlow must not be forked.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.components.preprocess.planning import plan_file
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.preprocess.writing.check import check_bucket
from shardline.components.preprocess.writing.shard import ShardWriter
from shardline.trainer import errors
from shardline.trainer.errors import BadRecordError, ShardlineError

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


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):  # the parent has gone, or is going
        sys.exit(1)
