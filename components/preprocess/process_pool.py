"""Process pool of preprocessing: this process and workers, each of which takes the next item of a job.

A worker reads jobs as lines of JSON from its standard input and answers on its output with progress, its
results, or the error that ended it. It ends with its parent. Not multiprocessing: that runs the user's own
main module again, and a parent that has loaded TensorFlow must not be forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from shardline.trainer.base import crash, errors
from shardline.trainer.base.errors import BadRecordError, RunError, ShardlineError

#: Receives progress: records and bytes since the last call.
Report = Callable[[int, int], None]

#: A function of a module: gets arguments for all items, its items, and a Report; returns results by item.
Job = Callable[[Mapping[str, Any], Iterable[str], Report], Mapping[str, Any]]

_WORKER = (sys.executable, "-P", "-m", "shardline.components.preprocess.process_pool")
_INTERVAL_SECONDS = 0.2

# A pipe takes at least a page, even where its user has reached the limit of pipe buffers.
_NUMBER_BYTES, _MOST_NUMBERS = 4, 1024

# A worker that is terminated removes its unfinished files.
_GRACE_SECONDS = 10.0

# Allocations before Python collects garbage: examples have no reference cycles, and 700 would cost a tenth.
_ALLOCATIONS = 50_000


class Processes(contextlib.AbstractContextManager["Processes"]):
    """This process and the workers that make up `count` with it. A context manager.

    Workers start at once and import the modules of their jobs, to be ready when the items are known.
    """

    def __init__(self, count: int, *jobs: Job) -> None:
        self._thresholds = gc.get_threshold()
        gc.set_threshold(_ALLOCATIONS)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(_search_path())}
        # A free process reads the number of its next group of items from this pipe.
        self._numbers, self._next = os.pipe()
        os.set_blocking(self._numbers, False)
        command = (*_WORKER, str(self._numbers), *dict.fromkeys(job.__module__ for job in jobs))
        self._workers = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                bufsize=0,
                pass_fds=[self._numbers],
            )
            for _ in range(count - 1)
        ]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        gc.set_threshold(*self._thresholds)
        os.close(self._numbers)
        os.close(self._next)
        for worker in self._workers:
            if kind is not None:
                worker.terminate()
            for stream in filter(None, (worker.stdin, worker.stdout)):
                with contextlib.suppress(OSError):
                    stream.close()
        for worker in self._workers:
            try:
                worker.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def run_job(
        self, job: Job, arguments: Mapping[str, Any], items: Sequence[str], report: Report
    ) -> dict[str, Any]:
        """Runs one of the jobs on items, the longest first, and returns its results, by item.

        `arguments` are the same for all items, as JSON; `report` receives the progress of all processes.
        Raises ShardlineError: that of the first process that failed, or one for a worker without an answer.
        """
        results: dict[str, Any] = {}
        each = -(-len(items) // _MOST_NUMBERS) or 1
        groups = [items[first : first + each] for first in range(0, len(items), each)]
        os.write(self._next, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(len(groups))))
        line = {"job": f"{job.__module__}:{job.__name__}", "arguments": arguments, "groups": groups}
        with selectors.DefaultSelector() as selector:
            for worker in self._workers[: len(groups)]:
                assert worker.stdin
                assert worker.stdout
                with contextlib.suppress(BrokenPipeError):  # one that has ended is noticed below
                    worker.stdin.write(json.dumps(line).encode() + b"\n")
                selector.register(worker.stdout, selectors.EVENT_READ, [worker, b""])

            def listen(timeout: float) -> None:
                ready = selector.select(timeout)
                for key, _ in ready:
                    if _receive(key.fd, key.data, results, report):
                        selector.unregister(key.fileobj)
                # A child of a killed worker may hold its output open for ever.
                for key in () if ready else tuple(selector.get_map().values()):
                    if key.data[0].poll() is not None:
                        raise _worker_lost(key.data[0])

            def report_own(records: int, size: int) -> None:
                report(records, size)
                listen(0)

            if groups:
                results |= job(arguments, _unclaimed_items(self._numbers, groups), report_own)
            while selector.get_map():
                report(0, 0)  # the receiver may raise to end the run
                listen(_INTERVAL_SECONDS)
        return results


def _unclaimed_items(numbers: int, groups: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields items that no other process has taken, until there are no more."""
    while True:
        try:
            number = os.read(numbers, _NUMBER_BYTES)
        except BlockingIOError:
            return
        yield from groups[int.from_bytes(number)]


def _receive(output: int, state: list[Any], results: dict[str, Any], report: Report) -> bool:
    worker, rest = state
    block = os.read(output, 1 << 16)
    if not block:
        raise _worker_lost(worker)
    *lines, state[1] = (rest + block).split(b"\n")
    for line in lines:
        answer = json.loads(line)
        if "error" in answer:
            error: ShardlineError = getattr(errors, answer["error"])(*answer["values"])
            raise error
        if "results" in answer:
            results |= answer["results"]
            return True
        report(answer["records"], answer["bytes"])
    return False


def _worker_lost(worker: subprocess.Popen[bytes]) -> RunError:
    worker.kill()
    status = worker.wait()
    how = f"was killed ({signal.Signals(-status).name})" if status < 0 else f"ended with status {status}"
    return RunError(
        f"a worker process {how}; was there too little memory? Run again: complete shards are kept"
    )


def _search_path() -> list[str]:
    """Returns the module search path for a worker; the working directory comes last unless it was set."""
    here = os.getcwd()
    named = {*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(errors.__file__).parents[2])}
    paths = [path or here for path in sys.path]
    return sorted(paths, key=lambda path: path == here and here not in named)


def _run_worker(answers: TextIO) -> None:
    numbers, *modules = sys.argv[1:]
    gc.set_threshold(_ALLOCATIONS)
    for module in modules:
        importlib.import_module(module)
    # Not before: a compiled module whose import is interrupted blames the installation.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    done, reported = [0, 0], time.monotonic()

    def flush() -> None:
        nonlocal reported
        answer = {"records": done[0], "bytes": done[1]}
        print(json.dumps(answer), file=answers, flush=True)
        done[:], reported = [0, 0], time.monotonic()

    def report(records: int, size: int) -> None:
        done[0] += records
        done[1] += size
        if time.monotonic() - reported >= _INTERVAL_SECONDS:
            flush()

    for line in sys.stdin:
        job = json.loads(line)
        items = _unclaimed_items(int(numbers), job["groups"])
        try:
            results = pkgutil.resolve_name(job["job"])(job["arguments"], items, report)
        except Exception as failure:
            error = crash.as_error(failure)
            values = [error.name, error.reason] if isinstance(error, BadRecordError) else [str(error)]
            print(json.dumps({"error": type(error).__name__, "values": values}), file=answers, flush=True)
            return
        flush()
        print(json.dumps({"results": results}), file=answers, flush=True)


if __name__ == "__main__":
    try:
        with open(os.dup(1), "w", encoding="utf-8") as output:
            os.dup2(2, 1)  # what a source or a library prints is no answer
            _run_worker(output)
    except (BrokenPipeError, KeyboardInterrupt):  # the parent has ended, or is ending
        sys.exit(1)
