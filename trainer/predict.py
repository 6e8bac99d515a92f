"""Predict: `keras.Model.evaluate` and `predict` on the workers of a cluster, each example once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.adapters.adapter import Batches, check_counts
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.fit import verbosity
from shardline.trainer.keras_compat.keras_internals import undo_patches, weigh_output_losses
from shardline.trainer.keras_compat.tensorflow_internals import iterate
from shardline.trainer.loop.build import BuildModel, build_with_variables
from shardline.trainer.loop.process import STRATEGY_SETTINGS, Process, check_options, this_process
from shardline.trainer.loop.step import EvaluationLoop, Logs


def evaluate(
    model: BuildModel,
    data: Any,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    verbose: str | int = "auto",
    **options: Any,
) -> Logs:
    """Evaluates a compiled model on all workers; every process calls this with the same arguments.

    Args:
        model: Model, or function that builds it, as in `fit`.
        data: Data as in `fit`; of a dataset directory the test split.
        batch_size: Examples in a global batch of arrays; None for 32.
        steps: Batches to evaluate, the first ones; None for all.
        verbose: "auto", 0 for nothing, 1 for a bar, 2 for the result only; on the chief.
        options: Options of `shardline.strategy`.

    Returns:
        Loss and metrics by name over all examples, the same on every process. Raises the errors of `fit`.
    """
    shown = verbosity(verbose)
    check_counts(batch_size=batch_size, steps=steps)
    process = _process("evaluate", options)
    with process.explain_errors():
        batches = process.data_adapter(0, batch_size).read(data, "data", steps=steps, restart=True)
        compiled = build_with_variables(process, model, process.settings, test_step=batches)
        process = process.for_model(compiled)
        with undo_patches(compiled):
            with process.strategy.scope():
                weigh_output_losses(compiled)
            distributed = batches.distribute(process.strategy, process.process, len(process.processes))
            evaluation = EvaluationLoop(compiled, process.strategy, distributed, batches.steps)
            evaluation.begin()
            for count in _step_counts(batches.steps, process, shown):
                evaluation.take(count)
            return evaluation.read()


def predict(
    model: BuildModel,
    data: Any,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    verbose: str | int = "auto",
    **options: Any,
) -> Any:
    """Predicts with a model on all workers; every process calls this with the same arguments.

    Args:
        model: Model, or function that builds it, as in `fit`.
        data: A `tf.data.Dataset` of global batches of inputs, or of (x, y), whose y is ignored; a function of
            an input context; or arrays, all of them inputs.
        batch_size: Examples in a global batch of arrays; None for 32.
        steps: Batches to predict, the first ones; None for all.
        verbose: "auto", 0 for nothing, 1 for a bar; on the chief.
        options: Options of `shardline.strategy`.

    Returns:
        The model's outputs for all examples as arrays in the order of the data, the same on every process;
        with a function of an input context first the chief's, then each worker's. Raises the errors of `fit`.
    """
    shown = verbosity(verbose)
    check_counts(batch_size=batch_size, steps=steps)
    process = _process("predict", options)
    if isinstance(data, str | Path):
        raise SettingsError(
            "predict takes a tf.data.Dataset, a function of an input context, or arrays; for a dataset "
            "directory see the report of 'shardline validate MODEL DATASET OUT'"
        )
    with process.explain_errors():
        if not callable(data) and not isinstance(data, tf.data.Dataset | keras.utils.PyDataset):
            data = (tuple(data) if isinstance(data, list) else data,)
        batches = process.data_adapter(0, batch_size).read(data, "data", steps=steps, restart=True, pad=True)
        loaded = build_with_variables(process, model, process.settings, predict_step=batches)
        process = process.for_model(loaded)
        strategy = process.strategy
        iterator = iterate(batches.distribute(strategy, process.process, len(process.processes)))

        @tf.function(autograph=False, reduce_retracing=True)  # type: ignore[untyped-decorator]
        def step(iterator: Any) -> Any:
            outputs = strategy.run(lambda batch: loaded.predict_step(batch), args=(next(iterator),))
            local = strategy.experimental_local_results
            return tf.nest.map_structure(lambda values: tf.concat(local(values), 0), outputs)

        # Outputs of this process's replicas for their parts of each batch, concatenated.
        counts = _step_counts(batches.steps, process, shown)
        parts = [tf.nest.map_structure(np.asarray, step(iterator)) for count in counts for _ in range(count)]
        leaves = zip(*map(tf.nest.flatten, parts), strict=True)
        size = batches.padded
        arrays = [_gather(process, batches, leaf)[:size] for leaf in leaves]
        return tf.nest.pack_sequence_as(parts[0], arrays)


def _process(call: str, options: Mapping[str, Any]) -> Process:
    check_options(call, options, STRATEGY_SETTINGS)
    process = this_process(options)
    if process.strategy_name == "parameter_server":
        raise SettingsError(
            f"{call} needs synchronous replicas, but this job has parameter servers; call it in a program of "
            "one process, or of workers only"
        )
    return process


def _step_counts(steps: int, process: Process, verbose: int) -> Iterator[int]:
    """Yields the steps of each of 20 updates of the bar, the same on all processes, and moves the bar."""
    shown = verbose == 1 and process.cluster.is_chief
    bar = keras.utils.Progbar(steps, verbose=1, unit_name="step") if shown else None
    each, done = max(1, steps // 20), 0
    while done < steps:
        count = min(each, steps - done)
        yield count
        done += count
        if bar:
            bar.update(done, finalize=done == steps)


def _gather(process: Process, data: Batches, parts: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Returns the parts of all processes in the order of the data. A collective."""
    own = np.concatenate(parts)
    collectives = process.collectives
    if collectives.processes == 1:
        return own
    is_text = own.dtype == object
    sent = tf.io.serialize_tensor(tf.constant(own, tf.string)).numpy() if is_text else own.tobytes()
    table = collectives.gather_values([len(part) for part in parts])
    counts = [[int(count) for count in row] for row in table]
    packed = collectives.gather_bytes(sent)
    if is_text:
        arrays = [tf.io.parse_tensor(bytes(each), tf.string).numpy() for each in packed]
    else:
        arrays = [np.frombuffer(each, own.dtype).reshape(-1, *own.shape[1:]) for each in packed]
    if data.is_per_process:
        return np.concatenate(arrays)
    divided = [np.split(array, np.cumsum(row)[:-1]) for array, row in zip(arrays, counts, strict=True)]
    return np.concatenate([part for step in zip(*divided, strict=True) for part in step])
