"""The asynchronous loop: the coordinator hands out steps, workers take them, servers hold the weights.

Each step is one batch, read by the coordinator (the chief) in the epoch's order and given, undecoded, to
whichever worker is free. The worker decodes it and runs the model's own `train_step` on weights that live on
the parameter servers. Workers do not wait for each other: a step may begin before the updates of those ahead
of it have arrived, and how steps interleave differs from run to run. So results are not reproducible to the
bit, except with one worker.

What is exact nevertheless: every example of an epoch is handed out once, steps are counted by the
coordinator, and metrics take in every step once (see `trainer.workers`). What is not, by the nature of the
method: updates of one weight by two workers at once, the moving statistics of BatchNormalization and the
random state of dropout are each read and then written by all workers; and the step of a worker that dies is
done again by another one although its update may have arrived.

Keras' `fit` does not work under ParameterServerStrategy, nor does a variable_partitioner: Keras asks every
variable for its handle, and a ShardedVariable has none.

A worker or a parameter server of an asynchronous run: a process that only serves the chief.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer import progress
from shardline.trainer.cluster import peers
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.exchange import optimizers
from shardline.trainer.errors import RunError, SettingsError
from shardline.trainer.step import Logs, Stretch
from shardline.trainer.workers import Outcome, Sums, Workers

Decode = Callable[[Any], Any]


class CoordinatorLoop:
    """Trains one model asynchronously. For the chief alone: all others only serve it."""

    def __init__(self, model: keras.Model, workers: Workers, batches: tf.data.Dataset, decode: Decode):
        """Wraps the model.

        Args:
            model: Compiled and built inside the strategy's scope.
            workers: Those that take the steps.
            batches: Undecoded batches, one for each step; the first dimension of every tensor is the batch.
            decode: Makes of such a batch what `model.train_step` takes; runs on the workers.

        Raises:
            SettingsError: When an optimizer accumulates gradients, which workers would mix up.
        """
        for optimizer in optimizers(model):
            if optimizer.gradient_accumulation_steps:
                raise SettingsError(
                    "strategy parameter_server cannot accumulate gradients: gradient_accumulation_steps asks "
                    "for replicas that step together; use larger batches or multi_worker_mirrored"
                )
        self._model = model
        self._workers = workers
        self._spec = batches.element_spec
        self._batches = iter(batches)
        self._decode = decode
        self._waited = 0.0
        self.retrace()

    def retrace(self) -> None:
        """Takes notice of a model whose trainable weights have changed."""
        self._step = self._workers.trace(self._model, self._model.train_step, self._decode, self._spec)

    def train(self, sizes: Sequence[int]) -> Stretch:
        """Trains one step for each of `sizes`, and returns when all of them are done.

        Raises:
            RunError: When a parameter server or all workers are gone.
            tf.errors.OpError: When a step itself fails, as on a label that the model does not have.
        """
        self._waited = 0.0
        diverged: list[int] = []

        def outcomes() -> Iterator[Outcome]:
            for index, outcome in enumerate(self._workers.run(self._step, self._take(len(sizes)))):
                if not outcome.finite:
                    diverged.append(index)
                yield outcome

        _add_to_metrics(self._model, outcomes())
        return Stretch(self._waited, diverged[0] if diverged else None)

    def reset_metrics(self) -> None:
        """Begins to count anew."""
        self._model.reset_metrics()

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
    """Evaluates one split on the workers, every example once."""

    def __init__(self, model: keras.Model, workers: Workers, batches: tf.data.Dataset, decode: Decode):
        """Wraps the model; arguments as for `CoordinatorLoop`, `batches` being one pass over the split."""
        self._model = model
        self._workers = workers
        self._batches = batches
        self._step = workers.trace(model, model.test_step, decode, batches.element_spec)

    def __call__(self) -> Logs:
        """Returns the exact means over all examples.

        Raises:
            RunError: When a parameter server or all workers are gone.
            tf.errors.OpError: When a step itself fails.
        """
        self._model.reset_metrics()
        _add_to_metrics(self._model, self._workers.run(self._step, self._batches))
        return _read_metrics(self._model)


def _read_metrics(model: keras.Model) -> Logs:
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def _add_to_metrics(model: keras.Model, outcomes: Iterable[Outcome]) -> None:
    """Adds what steps have counted to the model's metric variables, which nobody else writes."""
    variables = model.metrics_variables
    sums: Sums = np.zeros(sum(int(np.prod(variable.shape)) for variable in variables))
    for outcome in outcomes:
        sums += outcome.sums
    for variable in variables:
        size = int(np.prod(variable.shape))
        variable.assign_add(tf.cast(sums[:size].reshape(variable.shape), variable.dtype))
        sums = sums[size:]


# Seconds between two looks at the chief, and those after which a chief that does not answer has ended.
_PROBE_S = 1.0
_GONE_S = 10.0
_CONNECT_S = 5.0


def run_server(cluster: Cluster, startup_timeout: float = 600.0) -> None:
    """Serves until the chief has ended, well or badly.

    TensorFlow's server would never end, and outlive its job. The chief listens on its port for as long as
    it trains, which is how its end is noticed wherever it runs.

    Args:
        cluster: This process's place in the cluster: a worker or a parameter server.
        startup_timeout: Seconds within which the chief has to come up.

    Raises:
        RunError: When this process cannot listen on its port, or the chief did not come up.
    """
    chief, name = cluster.hosts[0], cluster.name
    if cluster.role == "ps":
        # Weights are served from memory; TensorFlow would take all of the GPU's that a worker may need.
        tf.config.set_visible_devices([], "GPU")
    server = _start(cluster)
    if not _within(startup_timeout, lambda: answers(chief)):
        raise RunError(
            f"{name} has waited {startup_timeout:g} s for the chief at {chief}, which does not answer; look "
            "at the chief's own log, and whether the network lets its port through"
        )
    progress.say("train", f"{name} serves the chief at {chief}")
    while _within(_GONE_S, lambda: answers(chief)):
        time.sleep(_PROBE_S)
    progress.say("train", f"{name} ends, as the chief has")
    del server


def answers(host: str) -> bool:
    """Whether somebody accepts connections at host:port."""
    return peers.answers(host, _CONNECT_S)


def _start(cluster: Cluster) -> tf.distribute.Server:
    try:
        return tf.distribute.Server(
            tf.train.ClusterSpec(cluster.tasks),
            job_name=cluster.task_type,
            task_index=cluster.task_index,
            protocol="grpc",
        )
    except tf.errors.OpError as error:
        raise RunError(
            f"{cluster.name} cannot listen on {cluster.addresses[cluster.name]}: "
            f"{str(error).splitlines()[0]}; is another process using the port?"
        ) from error


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Waits until the condition holds; returns whether it did in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PROBE_S)
    return True
