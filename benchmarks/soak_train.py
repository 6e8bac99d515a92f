"""Kills and stops replicas of a training job at random, starts it again each time, and compares the weights.

python -m benchmarks.soak_train --kills 20 --stops 10

A job is a chief and a worker that train a model with BatchNormalization, dropout and Adam with
op determinism on. At a random step the chief or the worker gets SIGKILL; the other is left to notice by
itself. Or, at the next validation or end of an epoch, one gets SIGTERM: all have to end with exit code 75.
Then the job is started again. When it has had its share it is left to finish, and the hash of its weights,
its history and the number of examples are compared with an undisturbed job's.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PER_JOB = 5
_SPLITS = {"train": 384, "validation": 32, "test": 8}
_BATCH = 8
_EPOCHS = 6
_MARK = "soak: "
_PLACES = ("in the validation", "in a callback")
_RESTART = 75


def marker_files() -> Any:
    """Returns a callback that says when it is in a validation or at an epoch's end, and stays a while."""
    import keras

    def stay(place: str) -> None:
        print(f"{_MARK}{place}", flush=True)
        time.sleep(0.3)

    class Marks(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
        def on_test_begin(self, logs: Any = None) -> None:
            stay(_PLACES[0])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            stay(_PLACES[1])

    return Marks()


@dataclass
class Soak:
    """One soak.

    Attributes:
        dataset: Directory of the dataset.
        replicas: Processes of the job.
        moments: Where the random moments come from.
        log: Seconds until all replicas had ended, by what was done ("kill", "stop") and to whom.
    """

    dataset: Path
    replicas: int
    moments: random.Random
    log: list[tuple[str, str, float]] = field(default_factory=list)

    def start(self, out: Path) -> list[subprocess.Popen[str]]:
        """Starts all replicas of the job."""
        hosts = [f"127.0.0.1:{port}" for port in _free_ports(self.replicas)]
        cluster = {"chief": hosts[:1], "worker": hosts[1:]}
        tasks = [("chief", 0), *(("worker", index) for index in range(self.replicas - 1))]
        command = [
            sys.executable,
            "-m",
            "shardline.trainer.task",
            "--dataset",
            str(self.dataset),
            "--model-dir",
            str(out),
        ]
        command += ["--model", "tests.helpers.models:restless", "--epochs", str(_EPOCHS), "--deterministic"]
        command += ["--per-replica-batch-size", str(_BATCH), "--steps-per-execution", "1"]
        command += ["--checkpoint-steps", "7", "--checkpoint-minutes", "0", "--early-stopping", "val_loss"]
        command += ["--early-stopping-patience", "100", "--callback", "tests.helpers.models:plateau"]
        command += ["--callback", "benchmarks.soak_train:marks"]
        return [
            subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "SHARDLINE_EVENTS": "1",
                    "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for kind, index in tasks
        ]

    def run(self, out: Path, what: Sequence[str]) -> None:
        """Runs one job to its end, on the way killing and stopping it as often as `what` says."""
        # A job that is stopped after its last step ends as if it were not: two epochs are left for a stop.
        steps = (_EPOCHS - 2) * _SPLITS["train"] // (_BATCH * self.replicas)
        targets = sorted(self.moments.sample(range(2, steps - 1), len(what)))
        disturbances = list(what)
        while True:
            processes = self.start(out)
            reader = _StepReader(processes[0])
            for other in processes[1:]:
                threading.Thread(target=other.communicate, daemon=True).start()
            if targets and reader.wait_for(targets[0]):
                self._disturb(disturbances.pop(0), targets.pop(0), processes, reader)
                continue
            codes = [process.wait(300) for process in processes]
            reader.join()
            if any(codes):
                raise SystemExit(f"the job failed with {codes}:\n" + "".join(reader.lines[-30:]))
            return

    def _disturb(
        self, what: str, step: int, processes: Sequence[subprocess.Popen[str]], reader: _StepReader
    ) -> None:
        """Kills one replica, or stops it at the next validation or callback, and waits for the end of all."""
        victim = self.moments.randrange(self.replicas)
        place = ""
        if what == "stop":
            place = f", {reader.wait_for_mark(self.moments.choice(_PLACES))}"
        else:
            time.sleep(self.moments.random() * 0.2)
        processes[victim].send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
        started = time.monotonic()
        codes = [process.wait(60) for process in processes]
        if what == "stop" and set(codes) != {_RESTART}:
            raise SystemExit(f"the job ended with {codes} after SIGTERM:\n" + "".join(reader.lines[-30:]))
        who = "chief" if victim == 0 else "worker"
        self.log.append((what, who, time.monotonic() - started))
        print(
            f"{what} of the {who} after step {step}{place}: all ended in {self.log[-1][2]:.1f} s", flush=True
        )


class _StepReader(threading.Thread):
    """Follows the chief's output and knows the last step that it has reported."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._changed = threading.Condition()
        self._step = 0
        self._mark = ""
        self._ended = False
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if '"kind": "progress"' in line:
                with self._changed:
                    self._step = json.loads(line.partition("@shardline 1 ")[2])["done"]
                    self._changed.notify_all()
            elif line.startswith(_MARK):
                with self._changed:
                    self._mark = line.removeprefix(_MARK).strip()
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, step: int) -> bool:
        """Returns whether the step was reached before the process ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._step >= step or self._ended, timeout=300)
            return self._step >= step

    def wait_for_mark(self, place: str) -> str:
        """Returns the place at the next mark of it; "" where the process has ended before."""
        with self._changed:
            self._mark = ""
            self._changed.wait_for(lambda: self._mark == place or self._ended, timeout=300)
            return self._mark


def digest(out: Path) -> str:
    """Returns a hash of the weights, the optimizer's state and the history without its times."""
    import zipfile

    whole = hashlib.sha256()
    with zipfile.ZipFile(out / "model.keras") as archive:
        path = Path(archive.extract("model.weights.h5", out / "extracted"))
    import h5py
    import numpy as np

    with h5py.File(path) as weights:
        names: list[str] = []
        weights.visit(names.append)
        for name in sorted(names):
            if isinstance(weights[name], h5py.Dataset):
                whole.update(name.encode() + np.asarray(weights[name]).tobytes())
    with (out / "history.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            whole.update(repr([(name, value) for name, value in row.items() if name != "seconds"]).encode())
    return whole.hexdigest()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def main() -> None:
    """Runs the soak and says what happened; exits with 1 where weights differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from tests.helpers.datasets import write_dataset

    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        directory = Path(name)
        write_dataset(directory / "data", records=_SPLITS, shards=4)
        moments = random.Random(options.seed)
        soak = Soak(directory / "data", options.replicas, moments)
        soak.run(directory / "whole", [])
        wanted = digest(directory / "whole")
        different = jobs = 0
        todo = ["kill"] * options.kills + ["stop"] * options.stops
        moments.shuffle(todo)
        for first in range(0, len(todo), _PER_JOB):
            out = directory / f"job-{jobs}"
            soak.run(out, todo[first : first + _PER_JOB])
            jobs += 1
            different += digest(out) != wanted
            print(
                f"job {jobs}: {'DIFFERENT' if digest(out) != wanted else 'the same weights and history'}",
                flush=True,
            )
    for what in ("kill", "stop"):
        times = [(who, seconds) for done, who, seconds in soak.log if done == what]
        chiefs, slowest = sum(who == "chief" for who, _ in times), max((s for _, s in times), default=0.0)
        print(f"{len(times)} {what}s ({chiefs} of the chief): all ended within {slowest:.1f} s")
    print(f"{jobs - different} of {jobs} jobs ended with the bytes of the undisturbed one")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
