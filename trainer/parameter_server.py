"""Asynchronous training: the coordinator hands out steps, workers take them, servers hold the weights.

Each step is one batch, read by the coordinator (the chief) in the epoch's order and given, undecoded, to
whichever worker is free. The worker decodes it and runs the model's own `train_step` on weights that live on
the parameter servers. Workers do not wait for each other: how steps interleave differs from run to run, so
that results are reproducible to the bit with one worker only.

Exact nevertheless: every example of an epoch is handed out once, steps are counted by the coordinator, and
metrics take in every step once. Not exact, by the nature of the method: updates of one weight by two workers
at once; the moving statistics of BatchNormalization and the state of dropout, which all workers read and
write; and the step of a worker that dies, which another one repeats although its update may have arrived.

Keras' `fit` does not work under ParameterServerStrategy, nor does a variable_partitioner: Keras asks every
variable for its handle, and a ShardedVariable has none.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer import progress
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.peers import answers
from shardline.trainer.errors import RunError, SettingsError
from shardline.trainer.keras_internals import OwnMetrics, optimizers
from shardline.trainer.step import Logs, Stretch
from shardline.trainer.tensorflow_internals import report_workers

# Steps handed out ahead for each worker: one that runs and one that waits. Each holds a batch in memory.
_AHEAD = 2

# Seconds: without any news, until the servers are asked whether they are still there; between two looks at
# the chief; without an answer, after which it has ended; and for a connection.
_SILENCE_S, _PROBE_S, _GONE_S, _CONNECT_S = 5.0, 1.0, 10.0, 5.0

Sums: TypeAlias = npt.NDArray[np.float64]
#: Result of a step: whether its loss is finite, and what it adds to each of the model's metric variables.
Outcome: TypeAlias = tuple[bool, Sums]
Step = Callable[[Any], tf.Tensor]
Decode = Callable[[Any], Any]


class Workers:
    """Hands out steps and notices who is gone.

    The step of a worker that dies is done again by another one, and a worker that is started again at the
    same address takes steps again. A run ends when a parameter server dies, or when no worker is left for
    `timeout` seconds.
    """

    def __init__(
        self, strategy: tf.distribute.ParameterServerStrategy, cluster: Cluster, timeout: float = 600.0
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
        self._scheduled: queue.SimpleQueue[tf.distribute.coordinator.RemoteValue] = queue.SimpleQueue()
        # None where a step has failed.
        self._outcomes: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        # In a thread, because there is no way to wait for a step for a limited time.
        threading.Thread(target=self._fetch, name="outcomes", daemon=True).start()
        report_workers(lambda text: progress.say("train", text))

    def trace(
        self, model: keras.Model, step: Callable[[Any], Any], decode: Callable[[Any], Any], spec: Any
    ) -> Step:
        """Returns the model's `train_step` or `test_step` as a function of an undecoded batch, for `run`."""
        variables = model.metrics_variables
        counters = [v for one in optimizers(model) for v in one.variables if v.name == "iteration"]

        def take(data: Any) -> tf.Tensor:
            with OwnMetrics(variables, counters) as own:
                logs = step(data)
                sums = [tf.reshape(own.get_current_value(variable), [-1]) for variable in variables]
            finite = tf.math.is_finite(tf.cast(logs.get("loss", 0.0), tf.float64))
            # One vector: every tensor is fetched by a call of its own.
            return tf.concat([tf.cast(part, tf.float64) for part in ([finite], *sums)], axis=0)

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def run(batch: Any) -> tf.Tensor:
            return self._strategy.run(take, args=(decode(batch),))

        any_size = tf.nest.map_structure(lambda one: tf.TensorSpec([None, *one.shape[1:]], one.dtype), spec)
        return cast("Step", run.get_concrete_function(any_size))

    def run(self, step: Step, batches: Iterable[Any]) -> Iterator[Outcome]:
        """Hands out a step for each batch and yields the outcomes, in the order of the batches.

        A RunError says that a parameter server or all workers are gone; a step's own error is TensorFlow's.
        """
        ahead = _AHEAD * len(self._workers)
        pending = 0
        for batch in batches:
            if pending == ahead:
                yield self._next()
                pending -= 1
            self._scheduled.put(self._coordinator.schedule(step, args=(batch,)))
            pending += 1
        for _ in range(pending):
            yield self._next()

    def _fetch(self) -> None:
        while True:
            try:
                finite, sums = np.split(self._scheduled.get().fetch(), [1])
                self._outcomes.put((bool(finite), sums))
            except tf.errors.OpError:
                self._outcomes.put(None)

    def _next(self) -> Outcome:
        while True:
            with contextlib.suppress(queue.Empty):
                if outcome := self._outcomes.get(timeout=_SILENCE_S):
                    self._alone_since = None
                    return outcome
            self._check()

    def _check(self) -> None:
        """Ends a run that cannot go on, where TensorFlow itself would wait for an hour."""
        try:
            self._coordinator.done()
        except tf.errors.OpError as error:
            self._check_servers(error)
            raise
        self._check_servers()
        if any(answers(host, _CONNECT_S) for host in self._workers):
            self._alone_since = None
            return
        self._alone_since = self._alone_since or time.monotonic()
        if time.monotonic() - self._alone_since > self._timeout:
            raise RunError(
                f"no worker has answered for {self._timeout:g} s, of {', '.join(self._workers)}; start the "
                "job again: it continues from the last checkpoint"
            )

    def _check_servers(self, cause: Exception | None = None) -> None:
        # A server that was started again answers, without its weights.
        restarted = isinstance(cause, tf.errors.UnavailableError | tf.errors.AbortedError)
        for index, host in enumerate(self._servers):
            named = restarted and f"/job:ps/replica:0/task:{index}" in str(cause)
            if named or not answers(host, _CONNECT_S):
                raise RunError(
                    f"parameter server ps-{index} ({host}) is gone, and the weights that it held with it; "
                    "start the job again: it continues from the last checkpoint"
                ) from cause


class CoordinatorLoop:
    """Trains one model asynchronously. For the chief alone: all others only serve it.

    `batches` are undecoded, one for each step, with the batch as first dimension of every tensor; `decode`
    makes of one what `model.train_step` takes, on the worker. Gradient accumulation is refused.
    """

    def __init__(self, model: keras.Model, workers: Workers, batches: tf.data.Dataset, decode: Decode):
        for optimizer in optimizers(model):
            if optimizer.gradient_accumulation_steps:
                raise SettingsError(
                    "strategy parameter_server cannot accumulate gradients: gradient_accumulation_steps asks "
                    "for replicas that step together; use larger batches or multi_worker_mirrored"
                )
        self.evaluate: Callable[[], Logs] = dict
        self.reset_metrics = model.reset_metrics
        self._model = model
        self._workers = workers
        self._spec = batches.element_spec
        self._batches = iter(batches)
        self._decode = decode
        self._waited = 0.0
        self.retrace()

    def retrace(self) -> None:
        """Traces the step again: the set of trainable weights has changed."""
        self._step = self._workers.trace(self._model, self._model.train_step, self._decode, self._spec)

    def train(self, sizes: Sequence[int]) -> Stretch:
        """Trains one step for each of `sizes`, and returns when all of them are done."""
        self._waited = 0.0
        diverged: list[int] = []

        def outcomes() -> Iterator[Outcome]:
            for index, outcome in enumerate(self._workers.run(self._step, self._take(len(sizes)))):
                if not outcome[0]:
                    diverged.append(index)
                yield outcome

        _add_to_metrics(self._model, outcomes())
        return Stretch(self._waited, diverged[0] if diverged else None)

    def read_metrics(self) -> Logs:
        """Returns the metrics since they were last reset."""
        return _read_metrics(self._model)

    def _take(self, count: int) -> Iterator[Any]:
        for _ in range(count):
            asked = time.monotonic()
            batch = next(self._batches)
            self._waited += time.monotonic() - asked
            yield batch


class CoordinatorEvaluation:
    """Evaluates one split, of which `batches` are one pass, on the workers; else as `CoordinatorLoop`."""

    def __init__(self, model: keras.Model, workers: Workers, batches: tf.data.Dataset, decode: Decode):
        self._model = model
        self._workers = workers
        self._batches = batches
        self._step = workers.trace(model, model.test_step, decode, batches.element_spec)

    def __call__(self) -> Logs:
        """Returns the exact means over all examples."""
        self._model.reset_metrics()
        _add_to_metrics(self._model, self._workers.run(self._step, self._batches))
        return _read_metrics(self._model)


def _read_metrics(model: keras.Model) -> Logs:
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def _add_to_metrics(model: keras.Model, outcomes: Iterable[Outcome]) -> None:
    """Adds what steps have counted to the model's metric variables, which nobody else writes."""
    variables = model.metrics_variables
    sums: Sums = np.zeros(sum(int(np.prod(variable.shape)) for variable in variables))
    for _, added in outcomes:
        sums += added
    for variable in variables:
        size = int(np.prod(variable.shape))
        variable.assign_add(tf.cast(sums[:size].reshape(variable.shape), variable.dtype))
        sums = sums[size:]


def run_server(cluster: Cluster, startup_timeout: float = 600.0) -> None:
    """Serves until the chief, who has to come up within the timeout (seconds), no longer listens.

    TensorFlow's server would never end, and outlive its job.
    """
    chief, name = cluster.hosts[0], cluster.name
    if cluster.role == "ps":
        # Weights are served from memory; TensorFlow would take all of the GPU's that a worker may need.
        tf.config.set_visible_devices([], "GPU")
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
            f"{str(error).splitlines()[0]}; is another process using the port?"
        ) from error
    if not _within(startup_timeout, lambda: answers(chief, _CONNECT_S)):
        raise RunError(
            f"{name} has waited {startup_timeout:g} s for the chief at {chief}, which does not answer; look "
            "at the chief's own log, and whether the network lets its port through"
        )
    progress.say("train", f"{name} serves the chief at {chief}")
    while _within(_GONE_S, lambda: answers(chief, _CONNECT_S)):
        time.sleep(_PROBE_S)
    progress.say("train", f"{name} ends, as the chief has")
    del server


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Waits until the condition holds; returns whether it did in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PROBE_S)
    return True
