"""Asynchronous training: a coordinator schedules steps on workers, with weights on parameter servers.

Each step is one batch, read by the coordinator (the chief) in the epoch's order and sent, undecoded, to the
next free worker. The worker decodes it and runs the model's own `train_step` on the weights of the parameter
servers. The interleaving of steps differs from run to run.

Exact: every example of an epoch is scheduled once, steps are counted by the coordinator, and metrics include
every step once. Not exact: concurrent updates of one weight by two workers; moving statistics and the state
of dropout; and the step of a worker that dies, which is repeated although its update may have arrived.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError, SettingsError
from shardline.trainer.checkpoint import finite_variables
from shardline.trainer.cluster import ClusterConfig, without_proxy
from shardline.trainer.distribute import accepts_connections
from shardline.trainer.keras_compat.keras_internals import (
    OwnMetrics,
    flat_logs,
    optimizers,
    updating_optimizers,
)
from shardline.trainer.keras_compat.tensorflow_internals import report_workers
from shardline.trainer.loop.step import Logs, Shapes, StepsResult, is_finite, metric_shapes, reported_metrics

# Scheduled steps for each worker: one that runs and one that waits. Each holds a batch in memory.
_QUEUED_STEPS = 2

_PROBE_AFTER_S = 5.0  # without a result, the servers are probed
_PROBE_INTERVAL_S = 1.0  # between two probes of the chief
_DEAD_AFTER_S = 10.0  # without an answer, the chief counts as ended
_CONNECT_S = 5.0

Sums: TypeAlias = npt.NDArray[np.float64]
#: Result of a step: whether its loss is finite, its increments of the model's metric variables, and the
#: numbers that a custom step returns in place of metrics.
Outcome: TypeAlias = tuple[bool, Sums, Logs]
Decode = Callable[[Any], Any]


@dataclass
class WorkerStep:
    """A traced step of an undecoded batch, whose results are parts of one vector.

    Attributes:
        run: Undecoded batch -> vector.
        metrics: Size of the increments of metric variables in the vector.
        custom_logs: Names and shapes of the values that a custom step returns in place of metrics.
    """

    run: Callable[[Any], tf.Tensor]
    metrics: int
    custom_logs: dict[str, tuple[int, ...]]

    def parts(self, result: npt.NDArray[np.float64]) -> Outcome:
        """Divides the vector."""
        sums, rest = np.split(result[1:], [self.metrics])
        logs: dict[str, Any] = {}
        for name, shape in self.custom_logs.items():
            size = int(np.prod(shape))
            logs[name] = rest[:size].reshape(shape)[()]
            rest = rest[size:]
        return bool(result[0]), sums, flat_logs(logs)


class Workers:
    """Scheduler of steps on workers, which detects lost servers and workers.

    A run ends if a parameter server dies, or if no worker is left for `timeout` seconds.
    """

    def __init__(
        self, strategy: tf.distribute.ParameterServerStrategy, cluster: ClusterConfig, timeout: float = 600.0
    ):
        if strategy.num_replicas_in_sync > 1:
            raise SettingsError(
                f"strategy parameter_server uses one GPU a worker, but workers have "
                f"{strategy.num_replicas_in_sync}; start a worker for each GPU, or use multi_worker_mirrored"
            )
        self._strategy = strategy
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._workers = cluster.tasks["worker"]
        self._servers = cluster.tasks["ps"]
        self._timeout = timeout
        self._alone_since: float | None = None
        self._scheduled: queue.SimpleQueue[tuple[WorkerStep, tf.distribute.coordinator.RemoteValue]] = (
            queue.SimpleQueue()
        )
        # None for a failed step; an exception in reading its result is raised by the consumer.
        self._outcomes: queue.SimpleQueue[Outcome | Exception | None] = queue.SimpleQueue()
        # In a thread, because waiting for a step has no time limit.
        threading.Thread(target=self._fetch, name="outcomes", daemon=True).start()
        report_workers(lambda text: progress.report("train", text))

    def trace(
        self, model: keras.Model, step: Callable[[Any], Any], decode: Callable[[Any], Any], spec: Any
    ) -> WorkerStep:
        """Returns the model's `train_step` or `test_step` as a function of an undecoded batch."""
        variables = model.metrics_variables
        weights = finite_variables(model.trainable_variables)
        counters = [v for item in optimizers(model) for v in item.variables if v.name == "iteration"]
        names = flat_logs(model.get_metrics_result()).keys()
        shapes: dict[str, tuple[int, ...]] = {}

        def take(data: Any) -> tf.Tensor:
            with OwnMetrics(variables, counters) as own:
                logs = step(data)
                sums = [tf.reshape(own.get_current_value(variable), [-1]) for variable in variables]
            known = reported_metrics(step, logs)
            values = known if known.keys() != names else {}
            shapes.update({name: tuple(value.shape) for name, value in values.items()})
            others = [tf.reshape(value, [-1]) for value in values.values()]
            # One vector, as every tensor would be fetched by a call of its own.
            parts = ([is_finite(logs, weights)], *sums, *others)
            return tf.concat([tf.cast(part, tf.float64) for part in parts], axis=0)

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def run(batch: Any) -> tf.Tensor:
            return self._strategy.run(take, args=(decode(batch),))

        any_size = tf.nest.map_structure(
            lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), spec
        )
        traced = run.get_concrete_function(any_size)
        return WorkerStep(traced, sum(int(np.prod(variable.shape)) for variable in variables), shapes)

    def run_steps(self, step: WorkerStep, batches: Iterable[Any]) -> Iterator[Outcome]:
        """Schedules a step for each batch and yields the outcomes, in the order of the batches.

        Raises RunError if a parameter server or all workers are lost; an error of a step is TensorFlow's.
        """
        limit = _QUEUED_STEPS * len(self._workers)
        pending = 0
        for batch in batches:
            if pending == limit:
                yield self._next()
                pending -= 1
            self._scheduled.put((step, self._coordinator.schedule(step.run, args=(batch,))))
            pending += 1
        for _ in range(pending):
            yield self._next()

    def _fetch(self) -> None:
        while True:
            try:
                step, scheduled = self._scheduled.get()
                self._outcomes.put(step.parts(scheduled.fetch()))
            except tf.errors.OpError:
                self._outcomes.put(None)
            except Exception as error:
                self._outcomes.put(error)

    def _next(self) -> Outcome:
        while True:
            with contextlib.suppress(queue.Empty):
                outcome = self._outcomes.get(timeout=_PROBE_AFTER_S)
                if isinstance(outcome, Exception):
                    raise outcome
                if outcome:
                    self._alone_since = None
                    return outcome
            self._check()

    def _check(self) -> None:
        """Ends a run that cannot continue, for which TensorFlow itself would wait for an hour."""
        try:
            self._coordinator.done()
        except tf.errors.OpError as error:
            self._check_servers(error)
            raise
        self._check_servers()
        if any(accepts_connections(host, _CONNECT_S) for host in self._workers):
            self._alone_since = None
            return
        self._alone_since = self._alone_since or time.monotonic()
        if time.monotonic() - self._alone_since > self._timeout:
            raise RunError(
                f"no worker has answered for {self._timeout:g} s, of {', '.join(self._workers)}; start the "
                "job again: it continues from the last checkpoint"
            )

    def _check_servers(self, cause: Exception | None = None) -> None:
        # A restarted server answers, but has lost its weights.
        restarted = isinstance(cause, tf.errors.UnavailableError | tf.errors.AbortedError)
        for index, host in enumerate(self._servers):
            named = restarted and f"/job:ps/replica:0/task:{index}" in str(cause)
            if named or not accepts_connections(host, _CONNECT_S):
                raise RunError(
                    f"parameter server ps-{index} ({host}) is gone, and the weights that it held with it; "
                    "start the job again: it continues from the last checkpoint"
                ) from cause


class _Steps:
    """Steps of one model on the workers, one for each undecoded batch, by a method of the model.

    `decode` converts a batch to the data of the step, on the worker.
    """

    def __init__(
        self,
        model: keras.Model,
        workers: Workers,
        step: Callable[[Any], Any],
        batches: tf.data.Dataset,
        decode: Decode,
    ):
        self._model, self._workers, self._batches = model, workers, batches
        self._custom_logs: Logs = {}
        self._step = workers.trace(model, step, decode, batches.element_spec)

    @property
    def shapes(self) -> Shapes:
        """Names and shapes of the metrics, or of what the step returns in their place."""
        return self._step.custom_logs or metric_shapes(self._model)

    def read_metrics(self) -> Logs:
        """Returns the exact means over the examples since the metrics were reset."""
        return self._custom_logs or flat_logs(self._model.get_metrics_result())

    def _add(self, outcomes: Iterable[Outcome]) -> None:
        """Adds the outcomes of steps to the model's metric variables, and keeps the last custom logs."""
        variables = self._model.metrics_variables
        sums: Sums = np.zeros(sum(int(np.prod(variable.shape)) for variable in variables))
        self._custom_logs = {}
        for _, added, logs in outcomes:
            sums += added
            self._custom_logs = logs
        for variable in variables:
            size = int(np.prod(variable.shape))
            variable.assign_add(tf.cast(sums[:size].reshape(variable.shape), variable.dtype))
            sums = sums[size:]


class CoordinatorLoop(_Steps):
    """Asynchronous training of one model, on the chief; `batches` are one for each step."""

    def __init__(self, model: keras.Model, workers: Workers, batches: tf.data.Dataset, decode: Decode):
        if any(optimizer.gradient_accumulation_steps for optimizer in updating_optimizers(model)):
            raise SettingsError(
                "strategy parameter_server cannot accumulate gradients: gradient_accumulation_steps asks "
                "for replicas that step together; use larger batches or multi_worker_mirrored"
            )
        super().__init__(model, workers, model.train_step, batches, decode)
        self.evaluation: CoordinatorEvaluation | None = None
        self.reset_metrics = model.reset_metrics
        self._iterator = iter(batches)

    def train(self, sizes: Sequence[int]) -> StepsResult:
        """Trains one step for each of `sizes`, and returns when all of them are done."""
        waited = 0.0
        diverged: list[int] = []

        def timed_batches() -> Iterator[Any]:
            nonlocal waited
            for _ in sizes:
                requested = time.monotonic()
                batch = next(self._iterator)
                waited += time.monotonic() - requested
                yield batch

        def outcomes() -> Iterator[Outcome]:
            for index, outcome in enumerate(self._workers.run_steps(self._step, timed_batches())):
                if not outcome[0]:
                    diverged.append(index)
                yield outcome

        self._add(outcomes())
        return StepsResult(waited, diverged[0] if diverged else None)


class CoordinatorEvaluation(_Steps):
    """Evaluation of one split, as `step.EvaluationLoop`; `batches` are one epoch of `steps`."""

    def __init__(
        self, model: keras.Model, workers: Workers, batches: tf.data.Dataset, decode: Decode, steps: int
    ):
        super().__init__(model, workers, model.test_step, batches, decode)
        self.steps = steps

    def begin(self) -> None:
        """Resets the metrics and the batches."""
        self._model.reset_metrics()
        self._iterator = iter(self._batches)

    def take_steps(self, count: int) -> None:
        """Takes some steps."""
        self._add(self._workers.run_steps(self._step, itertools.islice(self._iterator, count)))


def run_server(cluster: ClusterConfig, strategy_name: str, startup_timeout: float = 600.0) -> bool:
    """Runs a server until the chief, which has to start within the timeout (seconds), no longer listens.

    TensorFlow's own server would never end, and outlive its job. Returns False, at once, in a process that is
    neither a parameter server nor a worker of that strategy.
    """
    if strategy_name != "parameter_server" or cluster.role not in ("worker", "ps"):
        return False
    chief, name = cluster.hosts[0], cluster.name
    if cluster.role == "ps":
        # Weights are in main memory; TensorFlow would reserve GPU memory that a worker may need.
        tf.config.set_visible_devices([], "GPU")
    os.environ |= without_proxy(os.environ, cluster.addresses.values())
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(cluster.tasks),
            job_name=cluster.task_type,
            task_index=cluster.task_index,
            protocol="grpc",
        )
    except tf.errors.OpError as error:
        raise RunError(
            f"{name} cannot listen on {cluster.addresses[name]}: "
            f"{str(error).splitlines()[0]}; check whether another process uses the port"
        ) from error
    if not _wait_until(startup_timeout, lambda: accepts_connections(chief, _CONNECT_S)):
        raise RunError(
            f"{name} has waited {startup_timeout:g} s for the chief at {chief}, which does not answer; look "
            "at the chief's own log, and whether the network lets its port through"
        )
    progress.report("train", f"{name} serves the chief at {chief}")
    while _wait_until(_DEAD_AFTER_S, lambda: accepts_connections(chief, _CONNECT_S)):
        time.sleep(_PROBE_INTERVAL_S)
    progress.report("train", f"{name} ends, as the chief has")
    del server
    return True


def _wait_until(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PROBE_INTERVAL_S)
    return True
