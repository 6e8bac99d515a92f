"""Checkpoint store: the files from which an interrupted run continues."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import tensorflow as tf

from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import RunError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.checkpoint import identity as identities
from shardline.trainer.checkpoint.identity import Identity
from shardline.trainer.checkpoint.state import Position, Snapshot

_DATA, _INDEX = ".data-00000-of-00001", ".index"
#: File that the process that writes into the directory has locked.
LOCK_FILE = "lock"
# Exceptions for a damaged checkpoint: TensorFlow's reader maps its status codes to all of these.
_DAMAGED = (tf.errors.OpError, OSError, RuntimeError, ValueError, TypeError, LookupError)
# Name of the tensor with the JSON part of a snapshot.
_HOST = "host"


class Checkpoints:
    """Writes and reads snapshots as TensorFlow checkpoints, `ckpt-{steps}`.

    The index is renamed last, so a checkpoint with an index is complete. The chief writes in a thread while
    training continues; every process may read. The newest `keep` are kept. The directory is claimed for the
    run, another run's is refused, and files left by a killed writer are removed. Of two processes that would
    write into one directory of a machine, the second is refused until the first calls `close` or ends.
    """

    @classmethod
    def of(
        cls, settings: TrainSettings, directory: Path | None, identity: Identity, *, write: bool
    ) -> Checkpoints:
        """Returns the checkpoints of a run; without a directory nothing is written."""
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
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if directory is not None:
            identities.claim(directory, identity, allow_new_data=allow_new_data, write=write)
        if self._write:
            lock = os.open(self._directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._unlock = weakref.finalize(self, os.close, lock)
            if not files.lock(lock, optional=True):
                raise RunError(f"another process trains in {directory}; wait for it, or choose another one")
            self._remove_temporary()
            for data in self._directory.glob(f"ckpt-*{_DATA}"):
                if not Path(str(data).removesuffix(_DATA) + _INDEX).exists():
                    data.unlink()

    def save(self, snapshot: Snapshot, done: Callable[[], None] = lambda: None) -> None:
        """Starts writing a checkpoint after the previous one is written; `done` is called at the end."""

        def write() -> None:
            self._write_files(snapshot)
            done()

        if self._write:
            self.wait()
            self._pending = self._writer.submit(write)

    def wait(self) -> None:
        """Waits until the checkpoint is on disk; raises RunError when it cannot be written (disk full)."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def close(self) -> None:
        """Ends the writing, and lets another process write."""
        self._writer.shutdown()
        if self._write:
            self._unlock()

    def steps(self) -> list[int]:
        """Returns the steps that have checkpoints, in order."""
        indexes = self._directory.glob(f"ckpt-*{_INDEX}") if self._exists else ()
        numbers = (path.stem.removeprefix("ckpt-") for path in indexes)
        return sorted(int(number) for number in numbers if number.isdecimal())

    def read(self, steps: int) -> Snapshot:
        """Returns a checkpoint, verified by its checksums; raises RunError when it cannot be read.

        The position is the start of the epoch when the checkpoint is from another dataset.
        """
        path = self._path(steps)
        try:
            reader = tf.train.load_checkpoint(str(path))
            names = reader.get_variable_to_shape_map()
            arrays = {name: np.asarray(reader.get_tensor(name)) for name in names if name != _HOST}
            content = json.loads(reader.get_tensor(_HOST))
            position = Position(**content["position"])
        except _DAMAGED as error:
            raise RunError(f"cannot read checkpoint {path}: {_reason(error)}") from error
        if content["dataset"] != self._identity.dataset:
            position = replace(position, examples=0)
        return Snapshot(position, arrays, content["host"])

    def restore(self) -> Snapshot | None:
        """Returns the newest readable checkpoint, or None; reports a warning for each that is not."""
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
        temporary = path.with_name(f"{files.TEMPORARY}{path.name}")
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
                Path(f"{temporary}{suffix}").replace(f"{path}{suffix}")
            files.sync(self._directory)
            # Removes older checkpoints, and later ones, which are damaged or from an abandoned branch.
            kept = [steps for steps in self.steps() if steps <= snapshot.position.steps][-self._keep :]
            for steps in set(self.steps()) - set(kept):
                for suffix in (_INDEX, _DATA):
                    Path(f"{self._path(steps)}{suffix}").unlink(missing_ok=True)
        except (tf.errors.OpError, OSError) as error:
            size = sum(array.nbytes for array in snapshot.arrays.values())
            raise RunError(
                f"cannot write checkpoint {path}: {files.with_space(_reason(error), path, size)}; make room "
                "there and start the run again: it continues from the previous checkpoint"
            ) from error
        finally:
            self._remove_temporary()

    def _remove_temporary(self) -> None:
        for path in self._directory.glob(f"{files.TEMPORARY}*"):
            path.unlink(missing_ok=True)


def _reason(error: BaseException) -> str:
    """Returns an error's message without TensorFlow's prefix "{{node}} FILE; " and suffix "[Op:NAME]"."""
    text = (str(error).splitlines() or [""])[0]
    return re.sub(r"^.*; |\s*\[Op:\w+\]$", "", text) or type(error).__name__
