"""Process: this process among those that train, its peers and its strategy, and what it trains in a run."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from shardline.trainer import distribute, preemption
from shardline.trainer.base import crash, progress
from shardline.trainer.base.errors import EXIT_FAILED, ModelError, RunError, SettingsError, ShardlineError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster import ClusterConfig, read_cluster
from shardline.trainer.data import Batches, DataAdapter
from shardline.trainer.keras_compat import tensorflow_internals
from shardline.trainer.keras_compat.keras_internals import describe_model_error
from shardline.trainer.keras_compat.tensorflow_internals import short_error
from shardline.trainer.loop.parameter_server import run_server

#: Settings of the strategy and its peers.
STRATEGY_SETTINGS = ("strategy", "communication", "cpu_devices", "startup_timeout", "peer_timeout")


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process among those that train; `strategy_name` is that of the settings, with "auto" resolved."""

    settings: TrainSettings
    cluster: ClusterConfig
    peers: distribute.Peers
    strategy: tf.distribute.Strategy
    strategy_name: str

    @property
    def replicas(self) -> int:
        """Replicas that share each step; 1 for parameter servers, whose workers take whole steps."""
        count: int = self.strategy.num_replicas_in_sync
        return 1 if self.strategy_name == "parameter_server" else count

    @property
    def processes(self) -> tuple[str, ...]:
        """Names of the processes that share each step, in TensorFlow's order: "chief-0", "worker-0"."""
        if self.strategy_name == "multi_worker_mirrored" and self.cluster.tasks:
            return tuple(self.cluster.addresses)[: self.cluster.num_workers]
        return (self.cluster.name,)

    @property
    def process(self) -> int:
        """Index of this process in `processes`."""
        return self.processes.index(self.cluster.name)

    @functools.cached_property
    def collectives(self) -> distribute.Collectives:
        """Sums over the processes that share each step."""
        return distribute.Collectives(self.strategy, self.process, len(self.processes))

    def data_adapter(
        self, seed: int, batch_size: int | None, class_weight: Mapping[int, float] | None = None
    ) -> DataAdapter:
        """Returns the adapter of a program's data to this process."""
        return DataAdapter(self.process, len(self.processes), self.replicas, seed, batch_size, class_weight)

    def for_model(self, model: Any) -> Process:
        """Returns this process with a model's own strategy, if it was built before a strategy was created."""
        return replace(self, strategy=model.distribute_strategy) if self.is_alone else self

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Converts an exception in the context to an error of a peer, of the model or of the data."""
        try:
            yield
        except ShardlineError as error:
            raise self.peers.explain(error.__cause__) or error from error.__cause__
        except Exception as error:
            raise self.peers.explain(error) or explain(error) or error from error

    @property
    def is_alone(self) -> bool:
        """Whether one device of one process trains."""
        return self.strategy_name == "one_device"


# Seconds for other replicas to report their own stall, before the end of this one ends them.
_LAST_WORDS_S = 5.0


class Watchdog:
    """Watches one process while the context lasts."""

    def __init__(self, name: str, timeout: float):
        """Takes the replica's name, and the seconds without progress after which it ends; 0 for no limit."""
        self._name = name
        self._timeout = timeout
        self._state = ("", time.monotonic())
        self._over = threading.Event()

    def at(self, activity: str) -> None:
        """Records progress: a new activity of the process ("in step 41")."""
        self._state = (activity, time.monotonic())

    def rest(self) -> None:
        """Records that the process waits for something with a time limit of its own."""
        self._state = ("", math.inf)

    def __enter__(self) -> Watchdog:
        """Starts to watch."""
        self.at("at the beginning")
        if self._timeout:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the watch."""
        self._over.set()

    def _watch(self) -> None:
        """Ends the process from this thread: the main thread may wait in TensorFlow forever."""
        while not self._over.wait(min(1.0, self._timeout / 4)):
            activity, since = self._state
            if time.monotonic() - since <= self._timeout:
                continue
            text = (
                f"{self._name} has made no progress for {self._timeout:g} s (stall_timeout), {activity}; "
                "compare with the last lines of the other replicas: a callback that runs on one of them "
                "only, or code with another branch there, makes the others wait"
            )
            progress.fail("train", RunError(text))
            faulthandler.dump_traceback(file=sys.stderr)
            sys.stderr.flush()
            self._over.wait(_LAST_WORDS_S)
            os._exit(EXIT_FAILED)


@dataclass
class Counters:
    """Counters of a run.

    Attributes:
        total_steps: Steps of the whole run, if nothing ends it early.
        first_step: Steps that earlier processes have trained.
        steps: Steps of the whole run until now.
        examples: Examples that this process has trained, over all replicas.
        seconds: Seconds that this process has trained.
        waited: Seconds of these that it waited for input.
    """

    total_steps: int = 0
    first_step: int = 0
    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Process):
    """One run on one process.

    Attributes:
        checkpoints: Directory of checkpoints; None for none.
        data: Training data.
        validation: Validation data; None for none.
        validation_freq: Epochs between validations, or the numbers, from 1, of the epochs to validate.
        evaluates_final_weights: Whether the validation data is evaluated at the end, as callbacks may have
            restored other weights.
    """

    checkpoints: Path | None
    watchdog: Watchdog
    data: Batches
    validation: Batches | None = None
    validation_freq: int | Collection[int] = 1
    evaluates_final_weights: bool = False
    counters: Counters = field(default_factory=Counters)

    def validates(self, epoch: int) -> bool:
        """Whether the validation data is evaluated after an epoch, from 0."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


@contextlib.contextmanager
def join_cluster(
    settings: TrainSettings, cluster: ClusterConfig, name: str, fingerprint: str = ""
) -> Iterator[Process]:
    """Waits for the peers, which must have the same settings and dataset, and creates the strategy."""
    peers = distribute.Peers(cluster)
    gpus = len(tf.config.list_physical_devices("GPU"))
    peers.handshake(settings.startup_timeout, distribute.peer_config(settings, fingerprint, gpus))
    with tensorflow_internals.hearing_sigterm():
        strategy = distribute.create_strategy(settings, cluster)
    has_peers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    with distribute.abort_when_peer_ends(cluster) if has_peers else contextlib.nullcontext():
        yield Process(settings=settings, cluster=cluster, peers=peers, strategy=strategy, strategy_name=name)


_process: Process | None = None


def this_process(settings: Mapping[str, Any]) -> Process:
    """Returns this process of the cluster; the first call creates the strategy.

    A server (a parameter server, or a worker of that strategy) runs within the call, which then ends the
    program. Of `STRATEGY_SETTINGS` a later call may change startup_timeout only. Raises as `strategy` does.
    """
    global _process
    requested = {name: settings[name] for name in STRATEGY_SETTINGS if name in settings}
    chosen = TrainSettings(dataset="", model="fit", **requested)
    if _process is not None:
        gc.collect()  # the data of the call before, in cycles of references
        for name, value in requested.items():
            first = getattr(_process.settings, name)
            if name == "startup_timeout":  # all have started, with `shardline launch` before the program
                continue
            if value not in ("auto", first, _process.strategy_name if name == "strategy" else first):
                raise SettingsError(
                    f"{name} is {value!r}, but the first call, which creates the strategy, had {first!r}"
                )
        if lost := _process.peers.lost:
            raise RunError(f"an earlier call has {lost}; end this program, and start all processes again")
        return _process
    cluster = read_cluster(os.environ)
    preemption.handle_sigterm()
    if cluster.role == "evaluator":
        raise SettingsError(
            "TF_CONFIG makes this process an evaluator, and shardline.fit validates on the replicas; leave "
            "the evaluator out of the job"
        )
    name = distribute.choose_strategy(chosen, cluster)
    if run_server(cluster, name, chosen.startup_timeout):
        sys.exit(0)
    if cluster.tasks and cluster.is_chief:
        distribute.announce_devices(cluster, os.environ)
    stack = contextlib.ExitStack()
    try:
        _process = stack.enter_context(join_cluster(chosen, cluster, name))
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise SettingsError(
            "TensorFlow was used before this process has joined the others; call shardline.strategy() before "
            "the first tensor or dataset is made, start the program with 'shardline launch 2 --strategy "
            "PROGRAM', or pass the data as a function"
        ) from None
    if cluster.tasks:
        atexit.register(_leave, stack, _process)
        if cluster.is_chief:
            progress.report("train", f"{cluster}, strategy {name}")
    return _process


def check_options(call: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuses an option that a call does not have."""
    if unknown := sorted(set(options) - set(known)):
        raise SettingsError(f"{call} has no argument {unknown[0]!r}; options are {', '.join(sorted(known))}")


def strategy(**options: Any) -> tf.distribute.Strategy:
    """Returns the strategy of this process, in whose scope a model may be built before it is passed to `fit`.

    The first call joins the other processes of the cluster; if there are any, TensorFlow must not have been
    used before.

    Args:
        options: Settings of the trainer: strategy, communication, cpu_devices, startup_timeout, peer_timeout.

    Raises:
        SettingsError: TensorFlow was used before, another strategy was created before, there is no such
            option, or the task is an evaluator.
        ClusterError: The cluster is malformed.
        RunError: A process did not join in time.
    """
    check_options("strategy", options, STRATEGY_SETTINGS)
    return this_process(options).strategy


def _leave(stack: contextlib.ExitStack, process: Process) -> None:
    """Stops watching the peers, and waits for the chief unless this program has failed."""
    stack.close()
    failed = getattr(sys, "last_value", None) is not None
    if process.strategy_name == "multi_worker_mirrored" and not failed:
        process.peers.leave(300.0)  # seconds for the chief to end


# Errors of an op because of its inputs; others are errors of the machine, or bugs.
_INPUT_ERRORS = (
    tf.errors.DataLossError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.UnimplementedError,
    tf.errors.UnknownError,
)
_STEPS = ("train_step", "test_step", "predict_step")
_NODE = re.compile(r"Detected at node (?:while/)?(\S+) defined at")


def explain(error: Exception) -> ShardlineError | None:
    """Converts an exception about the user's model or data to an error; None if it is about neither."""
    if isinstance(error, OSError):
        return crash.from_os_error(error)
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return RunError(f"out of memory: {short_error(error)}; use smaller batches or a smaller model")
    if isinstance(error, _INPUT_ERRORS):
        text = str(error)
        if "IteratorGetNext" in text:
            return SettingsError(f"the data cannot be read: {short_error(error)}")
        where = f" in {node[1]}" if (node := _NODE.search(text)) else ""
        return ModelError(
            f"a step of the model failed{where}: {short_error(error)}; compare what the model returns with "
            "the data, and the loss with both"
        )
    frames = traceback.extract_tb(error.__traceback__)
    steps = [frame.name for frame in frames if frame.name in _STEPS]
    if not steps:
        return None
    return ModelError(f"{steps[0]} of the model failed: {describe_model_error(error)}")
