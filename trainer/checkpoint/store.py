"""Checkpoint store: the files from which an interrupted run continues."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import RunError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.checkpoint import identity as identities
from shardline.trainer.checkpoint.identity import Identity
from shardline.trainer.checkpoint.state import Position, Snapshot

_DATA, _INDEX = ".data-00000-of-00001", ".index"
#: Says which process writes into the directory.
WRITER_FILE = "writer.json"
# What reading a damaged one raises: TensorFlow's checkpoint reader maps its status codes to all of these.
_DAMAGED = (tf.errors.OpError, OSError, RuntimeError, ValueError, TypeError, LookupError)
# How often the writer's file is read, and seconds between, until it counts as unreadable: a mounted bucket
# may fail for a moment.
_ATTEMPTS, _PAUSE_S = 5, 1.0
# Name of the tensor that holds everything that is not an array.
_HOST = "host"


class Checkpoints:
    """Writes and reads snapshots as TensorFlow checkpoints, `ckpt-{steps}`.

    The index is renamed to its name last: a checkpoint exists when it has one, and is complete then. The
    chief writes, in a thread of its own, while training goes on; every process may read. The newest `keep`
    are kept. The directory is claimed, another run's refused, and what a killed writer had left is removed.
    Once a process claims it later, because this one was thought dead, only that one writes.
    """

    @classmethod
    def of(
        cls, settings: TrainSettings, directory: Path | None, identity: Identity, *, write: bool
    ) -> Checkpoints:
        """Returns those of a run, or where there is no directory some that keep nothing."""
        keep, allow_new_data = settings.keep_checkpoints, settings.allow_new_data
        return cls(directory, identity, keep=keep, write=write, allow_new_data=allow_new_data)

    def __init__(
        self,
        directory: Path | None,
        identity: Identity,
        *,
        keep: int,
        write: bool,
        allow_new_data: bool = False,
    ):
        self._directory, self._identity, self._keep = directory or Path(), identity, keep
        self._exists, self._write = directory is not None, write and directory is not None
        self._token = secrets.token_hex(8)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if directory is not None:
            identities.claim(directory, identity, allow_new_data=allow_new_data, write=write)
        if self._write:
            # From now on this process is the one that writes: a mounted bucket has neither locks nor links.
            self._directory.mkdir(parents=True, exist_ok=True)
            writer = {"token": self._token, "host": socket.gethostname(), "process": os.getpid()}
            files.write_json(self._directory / WRITER_FILE, writer)
            self._remove_temporary()
            for data in self._directory.glob(f"ckpt-*{_DATA}"):
                if not Path(str(data).removesuffix(_DATA) + _INDEX).exists():
                    data.unlink()

    def save(self, snapshot: Snapshot, done: Callable[[], None] = lambda: None) -> None:
        """Begins to write a checkpoint, once the one before is written; `done` is called after it."""

        def write() -> None:
            self._write_files(snapshot)
            done()

        if self._write:
            self.wait()
            self._pending = self._writer.submit(write)

    def wait(self) -> None:
        """Returns when everything is on disk; a RunError when it could not be written (disk full)."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def check_writer(self) -> None:
        """Raises a RunError when this process should write and is no longer the one that does."""
        if not self._write:
            return
        path, found, failure = self._directory / WRITER_FILE, dict[str, Any](), Exception()
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S)
            try:
                found = dict(json.loads(path.read_text(encoding="utf-8")))
                break
            except FileNotFoundError:
                break
            except (OSError, ValueError, TypeError, RecursionError) as error:
                failure = error
        else:
            reason = (isinstance(failure, OSError) and failure.strerror) or failure
            raise RunError(
                f"cannot read {path}: {reason}; start the run again when the directory can be read: it "
                "continues from the last checkpoint"
            ) from failure
        if found.get("token") == self._token:
            return
        by = f"process {found.get('process')} on {found.get('host')}" if found else "another process"
        raise RunError(
            f"{by} has taken over {self._directory} since this process claimed it: this one was thought "
            "dead, or is a second chief; end one of the two, or give it directories of its own"
        )

    def steps(self) -> list[int]:
        """Returns the steps of which there are checkpoints, in order."""
        found = self._directory.glob(f"ckpt-*{_INDEX}") if self._exists else ()
        numbers = (path.stem.removeprefix("ckpt-") for path in found)
        return sorted(int(number) for number in numbers if number.isdecimal())

    def read(self, steps: int) -> Snapshot:
        """Returns a checkpoint, verified against its checksums; a RunError says when it cannot be read.

        Its position goes back to the start of its epoch when it was taken on another dataset.
        """
        path = self._path(steps)
        try:
            reader = tf.train.load_checkpoint(str(path))
            names = reader.get_variable_to_shape_map()
            arrays = {name: np.asarray(reader.get_tensor(name)) for name in names if name != _HOST}
            found = json.loads(reader.get_tensor(_HOST))
            position = Position(**found["position"])
        except _DAMAGED as error:
            raise RunError(f"cannot read checkpoint {path}: {_reason(error)}") from error
        if found["dataset"] != self._identity.dataset:
            position = replace(position, examples=0)
        return Snapshot(position, arrays, found["host"])

    def restore(self) -> Snapshot | None:
        """Returns the newest checkpoint that can be read, with a warning for each that cannot; or None."""
        for steps in reversed(self.steps()):
            try:
                return self.read(steps)
            except RunError as error:
                if self._write:
                    progress.report("train", f"warning: {error}; continuing without it")
        return None

    def _path(self, steps: int) -> Path:
        return self._directory / f"ckpt-{steps}"

    def _write_files(self, snapshot: Snapshot) -> None:
        path = self._path(snapshot.position.steps)
        temporary = path.with_name(f"{files.TEMPORARY}{self._token}-{path.name}")
        position, dataset = asdict(snapshot.position), self._identity.dataset
        host = {"position": position, "dataset": dataset, "host": snapshot.host}
        tensors = {**snapshot.arrays, _HOST: json.dumps(host)}
        names = sorted(tensors)
        try:
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=str(temporary),
                    tensor_names=names,
                    shape_and_slices=[""] * len(names),
                    tensors=[tf.constant(tensors[name]) for name in names],
                )
            for suffix in (_DATA, _INDEX):
                files.sync(Path(f"{temporary}{suffix}"))
            for suffix in (_DATA, _INDEX):
                self.check_writer()
                Path(f"{temporary}{suffix}").replace(f"{path}{suffix}")
            files.sync(self._directory)
            self.check_writer()
            # Older ones than those that are kept go, and later ones: damaged, or of another past.
            kept = [steps for steps in self.steps() if steps <= snapshot.position.steps][-self._keep :]
            for steps in set(self.steps()) - set(kept):
                for suffix in (_INDEX, _DATA):
                    Path(f"{self._path(steps)}{suffix}").unlink(missing_ok=True)
        except (tf.errors.OpError, OSError) as error:
            if self._directory.is_dir():
                self.check_writer()  # who takes over removes what is being written
            raise RunError(
                f"cannot write checkpoint {path}: {_reason(error)}; make room there and start the run "
                "again: it continues from the checkpoint before"
            ) from error
        finally:
            self._remove_temporary(self._token)

    def _remove_temporary(self, token: str = "") -> None:
        for path in self._directory.glob(f"{files.TEMPORARY}{token}*"):
            path.unlink(missing_ok=True)


def _reason(error: BaseException) -> str:
    """Returns what went wrong, without TensorFlow's "{{node}} FILE; " before it and "[Op:NAME]" behind."""
    text = (str(error).splitlines() or [""])[0]
    return re.sub(r"^.*; |\s*\[Op:\w+\]$", "", text) or type(error).__name__
