"""Checkpoint store: the files from which an interrupted run continues, and the identity of that run.

The identity is what must stay the same when the run resumes; a record has what has changed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import DamagedError, RunError, SettingsError
from shardline.trainer.base.settings import PATH_SETTINGS, SETTINGS_FILE, TrainSettings
from shardline.trainer.checkpoint.state import Position, Snapshot
from shardline.trainer.keras_compat.tensorflow_internals import share_memory

IDENTITY_FILE = "run.json"

# Settings that determine the variables, their initial values, or the order of examples.
_FIXED_SETTINGS = ("gradient_accumulation_steps", "initial_model", "seed")
_DATA, _INDEX = ".data-00000-of-00001", ".index"
#: File that the process that writes into the directory has locked.
LOCK_FILE = "lock"
# Prefix of the files of a damaged checkpoint, of which the newest few are kept to be looked at.
_ASIDE, _KEPT_ASIDE = "damaged-", 3
# TensorFlow's reader maps its status codes to all of these, most to the first, which has no code.
_READ_ERRORS = (tf.errors.OpError, OSError, RuntimeError, ValueError, TypeError, LookupError)
_DAMAGE = (tf.errors.OpError, tf.errors.DataLossError, tf.errors.OutOfRangeError)
# Name of the tensor with the JSON part of a snapshot.
_HOST = "host"


@dataclass(frozen=True)
class Identity:
    """Identity of a run: its `model` setting, its dataset's fingerprint, and `TrainingState.variables`.

    `fixed` are further settings that may not change. They and the variables are empty, and not compared, in
    a process that has only some of them (the evaluator). `format` is that of checkpoints and their records.
    """

    model: str
    dataset: str
    variables: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    format: int = 1


def claim(directory: Path, identity: Identity, *, allow_new_data: bool, write: bool) -> None:
    """Claims a checkpoint directory for this run, or refuses another run's; only the chief writes."""
    path = directory / IDENTITY_FILE
    previous = _read(path)
    own = asdict(identity)
    _check_same_run(f"{directory} holds checkpoints", previous, own, allow_new_data=allow_new_data)
    if write and previous != own:
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(path, own)


def check_model_dir(directory: Path, *, model: str, dataset: str, allow_new_data: bool) -> None:
    """Refuses a model directory of another run, before a model is built."""
    settings = _read(directory / SETTINGS_FILE)
    previous = {"model": settings.get("model"), "dataset": settings.get("fingerprint")} if settings else {}
    own = {"model": model, "dataset": dataset}
    _check_same_run(f"{directory} holds the model", previous, own, allow_new_data=allow_new_data)


def _read(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path, SettingsError) if path.exists() else {}
    except SettingsError as error:
        raise SettingsError(f"{error}; choose another directory, or delete this file to continue") from None


def _check_same_run(
    what: str, previous: Mapping[str, Any], own: Mapping[str, Any], *, allow_new_data: bool
) -> None:
    """Raises SettingsError with the first difference between a previous run, if any, and this one."""
    if not previous:
        return
    differences = []
    hints = {"format": "", "model": "", "dataset": " (allow_new_data continues on the new one)"}
    for name, hint in hints.items():
        if previous.get(name) != own.get(name) and not (name == "dataset" and allow_new_data):
            differences.append(f"{name} was {previous.get(name)!r}, is {own[name]!r}{hint}")
    before, now = previous.get("fixed", {}), own.get("fixed", {})
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            differences.append(f"{name} was {before[name]!r}, is {now[name]!r}")
    before, now = previous.get("variables", {}), own.get("variables", {})
    for name in sorted(before.keys() | now.keys()) if now else ():
        if before.get(name) != now.get(name):
            differences.append(
                f"variable {name} was {before.get(name, 'absent')}, is {now.get(name, 'absent')}"
            )
    if differences:
        raise SettingsError(
            f"{what} of another run: {differences[0]}; choose another directory or delete that one"
        )


@dataclass(frozen=True)
class IdentityRecord:
    """Record of a run's settings, as JSON in its checkpoints.

    `learning_rates` are those of the optimizers as built, each a number or a schedule's configuration;
    `changes` those when the run resumed earlier, as in settings.json.
    """

    settings: Mapping[str, Any]
    replicas: int
    learning_rates: Sequence[Any]
    changes: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, settings: TrainSettings, replicas: int, learning_rates: Sequence[Any]) -> IdentityRecord:
        """Returns the record of a new run."""
        values = {"settings": asdict(settings), "learning_rates": learning_rates}
        return cls(replicas=replicas, **json.loads(json.dumps(values)))

    @property
    def fixed(self) -> dict[str, Any]:
        """Settings that are part of the run's identity."""
        kinds = ["number" if isinstance(rate, float) else "schedule" for rate in self.learning_rates]
        return {**{name: self.settings[name] for name in _FIXED_SETTINGS}, "learning_rate": ", ".join(kinds)}

    def continuing(self, before: IdentityRecord, step: int) -> tuple[IdentityRecord, str]:
        """Returns this run's record when it resumes at a step, from 1, and a description of the changes."""
        was, now = before.settings, self.settings
        names = [name for name in now if was[name] != now[name] and name not in PATH_SETTINGS]
        changed = {name: (was[name], now[name]) for name in names}
        if before.replicas != self.replicas:
            changed["replicas"] = (before.replicas, self.replicas)
        for old, new in zip(before.learning_rates, self.learning_rates, strict=False):
            # The optimizer's rate is compared, whether it comes from a setting or from code.
            if old != new:
                changed["learning_rate"] = (format_rate(old), format_rate(new))
        changes = [{"step": step, "setting": name, "was": a, "is": b} for name, (a, b) in changed.items()]
        text = ", ".join(
            f"{name} was {_format_value(a)}, is {_format_value(b)}" for name, (a, b) in changed.items()
        )
        return replace(self, changes=[*before.changes, *changes]), text and f"{text} from step {step:,} on"


def format_rate(rate: Any) -> Any:
    """Returns a number as it is, a schedule as text: "CosineDecay(decay_steps=30, ...)"."""
    if not isinstance(rate, dict):
        return rate
    config = {name: format_rate(value) for name, value in rate.get("config", {}).items() if name != "name"}
    # Numbers of 32 bits as they were written: 0.003, not 0.003000000026077032.
    config = {name: f"{value:g}" if isinstance(value, float) else value for name, value in config.items()}
    values = ", ".join(f"{name}={value}" for name, value in config.items() if value is not None)
    return f"{rate.get('class_name')}({values})"


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return value or "not set"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


class Checkpoints:
    """Writes and reads snapshots as TensorFlow checkpoints, `ckpt-{steps}`.

    The index is renamed last, so a checkpoint with an index is complete. The chief writes in a thread while
    training continues; every process may read. The newest `keep_checkpoints` are kept. One is damaged when
    its files were read, and are not what was written; one that cannot be read is an error, and nothing is
    removed for it. The directory is claimed for the run, another run's is refused, and temporary files of a
    killed writer are removed. Of two processes that would write into one directory of a machine, the second
    is refused until the first calls `close` or ends.
    """

    def __init__(self, settings: TrainSettings, directory: Path | None, identity: Identity, *, write: bool):
        """Claims the directory of a run; without one nothing is written."""
        self._directory, self._identity, self._keep = directory or Path(), identity, settings.keep_checkpoints
        self._exists, self._write = directory is not None, write and directory is not None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: dict[int, DamagedError] = {}
        if directory is not None:
            claim(directory, identity, allow_new_data=settings.allow_new_data, write=write)
        if self._write:
            lock = os.open(self._directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._unlock = weakref.finalize(self, os.close, lock)
            if not files.lock(lock, optional=True):
                raise RunError(f"another process trains in {directory}; wait for it, or choose another one")
            self._remove_temporary()

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
        """Returns the steps that have checkpoints, in order; RunError where they cannot be listed."""
        return self._steps_of(_INDEX) if self._exists else []

    def _steps_of(self, suffix: str, prefix: str = "") -> list[int]:
        pattern = re.compile(f"{prefix}ckpt-([0-9]+){re.escape(suffix)}")
        return sorted(
            int(found[1]) for name in files.names(self._directory) if (found := pattern.fullmatch(name))
        )

    def read_snapshot(self, steps: int, names: str = "") -> Snapshot:
        """Returns a checkpoint, verified by its checksums; DamagedError, or RunError if it cannot be read.

        Its arrays are those whose names begin with `names`. The position is the start of the epoch when the
        checkpoint is from another dataset.
        """
        path = self._path(steps)
        try:
            os.stat(f"{path}{_INDEX}")  # TensorFlow's search for it takes any failure for its absence
            with files.plain_name(self._directory) as directory:  # and [ or * in its name for a pattern
                reader = tf.train.load_checkpoint(f"{directory}/{path.name}")
                content = json.loads(reader.get_tensor(_HOST))
                found = [name for name in reader.get_variable_to_shape_map() if name.startswith(names)]
                arrays = {name: np.asarray(reader.get_tensor(name)) for name in found if name != _HOST}
            position, dataset, host = Position(**content["position"]), content["dataset"], content["host"]
        except _READ_ERRORS as error:
            kind = DamagedError if _is_damage(error) else RunError
            raise kind(f"cannot read checkpoint {path}: {_reason(error)}") from error
        if dataset != self._identity.dataset:
            position = replace(position, examples=0)
        return Snapshot(position, arrays, host)

    def restore(self) -> Snapshot | None:
        """Returns the newest checkpoint that is not damaged; None where there is none at all.

        Raises DamagedError when all are damaged: to train from the beginning is for the user to decide.
        """
        steps = self.steps()
        for each in reversed(steps):
            try:
                return self.read_snapshot(each)
            except DamagedError as error:
                self._damaged[each] = error
            except RunError as error:
                raise RunError(f"{error}; nothing was removed: start the run again") from error
        if not steps:
            return None
        raise DamagedError(
            f"none of the {len(steps)} checkpoints in {self._directory} is whole; the newest: "
            f"{self._damaged[steps[-1]]}; restore the files, or move them away to train from the beginning"
        )

    def set_aside(self) -> None:
        """Renames the damaged checkpoints that `restore` has found, once all processes have read the same."""
        for steps, error in self._damaged.items() if self._write else ():
            path = self._path(steps)
            for suffix in (_INDEX, _DATA):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{path}{suffix}").replace(path.with_name(f"{_ASIDE}{path.name}{suffix}"))
            progress.report(
                "train", f"warning: {error}; renamed to {_ASIDE}{path.name}, continuing without it"
            )
        self._damaged.clear()
        for steps in self._steps_of(_INDEX, _ASIDE)[:-_KEPT_ASIDE] if self._write else ():
            self._remove(steps, _ASIDE)

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
                    tensors=[share_memory(tensors[name]) for name in names],
                )
            for suffix in (_DATA, _INDEX):
                files.sync(Path(f"{temporary}{suffix}"))
            for suffix in (_DATA, _INDEX):
                Path(f"{temporary}{suffix}").replace(f"{path}{suffix}")
            files.sync(self._directory)
            # Older ones, and data files that a killed writer left without an index. A later one can only be
            # there if it was not seen when the run began.
            now = snapshot.position.steps
            oldest = [*(steps for steps in self.steps() if steps < now), now][-self._keep :][0]
            for steps in self._steps_of(_DATA):
                if steps < oldest:
                    self._remove(steps)
        except (tf.errors.OpError, OSError) as error:
            size = sum(np.asarray(array).nbytes for array in snapshot.arrays.values())
            raise RunError(
                f"cannot write checkpoint {path}: {files.with_space(_reason(error), path, size)}; make room "
                "there and start the run again: it continues from the previous checkpoint"
            ) from error
        finally:
            self._remove_temporary()

    def _remove(self, steps: int, prefix: str = "") -> None:
        for suffix in (_INDEX, _DATA):
            self._directory.joinpath(f"{prefix}ckpt-{steps}{suffix}").unlink(missing_ok=True)

    def _remove_temporary(self) -> None:
        for path in self._directory.glob(f"{files.TEMPORARY}*"):
            path.unlink(missing_ok=True)


def _is_damage(error: BaseException) -> bool:
    """Whether files are not what was written, or the data file is missing, rather than unreadable now."""
    if isinstance(error, OSError) or (isinstance(error, tf.errors.OpError) and type(error) not in _DAMAGE):
        return False
    # Without their codes, the system's errors are known by their text.
    numbers = [number for number in errno.errorcode if str(error).endswith(f"; {os.strerror(number)}")]
    return numbers in ([], [errno.ENOENT])


def _reason(error: BaseException) -> str:
    """Returns an error's message without TensorFlow's prefix "{{node}} FILE; " and suffix "[Op:NAME]"."""
    text = (str(error).splitlines() or [""])[0]
    return re.sub(r"^.*; |\s*\[Op:\w+\]$", "", text) or type(error).__name__
