"""Fit: `keras.Model.fit`, `evaluate` and `predict` on the workers of a cluster, for any program.

`docs/fit.md` has a table of arguments that are the same as Keras', additional, or refused.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer import loop
from shardline.trainer.base import files, plugins, progress
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.checkpoint import Position
from shardline.trainer.data import Batches, BatchSequence, check_counts, check_whole_number
from shardline.trainer.distribute import check_strategy_settings, describe_difference
from shardline.trainer.keras_compat.datasets import drawing_datasets
from shardline.trainer.keras_compat.keras_internals import undo_patches, weigh_output_losses
from shardline.trainer.keras_compat.tensorflow_internals import iterate
from shardline.trainer.loop.build import BuildModel, build_with_variables
from shardline.trainer.loop.callbacks import Hooks, check_callback
from shardline.trainer.preemption import Preemption, during_a_run

#: Settings of the trainer that `fit` takes by their names.
OPTIONS = (
    *loop.STRATEGY_SETTINGS,
    *("checkpoint_minutes", "checkpoint_steps", "deterministic", "keep_checkpoints"),
    *("gradient_accumulation_steps", "grace_period", "jit_compile"),
    *("max_steps", "max_time", "seed", "stall_timeout", "steps_per_execution"),
)


def fit(
    build_model: BuildModel,
    train_data: Any,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Sequence[keras.callbacks.Callback] | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] = 1,
    checkpoint_dir: str | Path | None = None,
    **options: Any,
) -> keras.callbacks.History:
    """Trains a compiled Keras 3 model on all workers of the cluster, or in this process alone.

    Every process runs the same program and calls this with the same arguments. Each reads all data and trains
    on its replicas' parts of every batch, so N processes train on exactly the same batches as one. A shuffle
    of a `tf.data.Dataset` needs a seed for that; arrays are shuffled by `seed` and the number of the epoch.

    Args:
        build_model: A function without arguments that returns a compiled model, called in the scope of the
            strategy; or a compiled model that was built in `shardline.strategy().scope()`.
        train_data: A `tf.data.Dataset` of global batches (x, y) or (x, y, sample_weight); a function that
            takes a `tf.distribute.InputContext` and returns this process's dataset of batches of one replica;
            a tuple of arrays; a `keras.utils.PyDataset`; or a dataset directory: its training split.
        batch_size: Examples in a global batch of arrays or of a dataset directory; None for 32.
        epochs: Number of the epoch after which training ends; with 0 the model is built and not trained.
        verbose: "auto", 0 for nothing, 1 for a bar, 2 for a line an epoch; on the chief.
        callbacks: Keras callbacks, the same in every process. Those that write files run on the chief.
        validation_split: Fraction of arrays, from their end, that is held out for validation; ignored with
            `validation_data`.
        validation_data: Like `train_data`; of a dataset directory the validation split.
        shuffle: Whether arrays are shuffled in every epoch.
        class_weight: Weight of each class in the loss.
        initial_epoch: Epoch, from 0, at which a run without a checkpoint begins.
        steps_per_epoch: Batches in an epoch, from data that is repeated without end; None for all data once.
        validation_steps: Batches in a validation, always the first ones; None for all.
        validation_batch_size: Examples in a global batch of the validation arrays; None for `batch_size`.
        validation_freq: Epochs between validations, or the numbers, from 1, of the epochs to validate.
        checkpoint_dir: Directory shared by all processes; a run resumes at the step of a checkpoint in it.
            None for the directory of a BackupAndRestore callback, or for no checkpoints.
        options: Settings of the trainer by name: strategy, seed, checkpoint_steps and others (`OPTIONS`).

    Returns:
        The history, the same on every process.

    Raises:
        SettingsError: An argument is wrong, or differs from another process's.
        ModelError: The model is not compiled, or cannot be trained.
        DivergedError: The loss is no longer finite.
        RunError: Another process is lost.
        RestartError: SIGTERM was received; a checkpoint was saved if there is a directory for it.
            A program that leaves SIGTERM to Shardline gets SystemExit, with exit code 75.
    """
    passed = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    chosen = keras.tree.flatten(passed) if passed else []
    for callback in chosen:
        check_callback(callback, "callbacks has to be a list of keras.callbacks.Callback, it holds a")
    check_counts(
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        validation_steps=validation_steps,
        validation_batch_size=validation_batch_size,
    )
    if not isinstance(shuffle, bool | np.bool):
        raise SettingsError(f"shuffle must be true or false, not {shuffle!r}")
    frequency, shown = _validation_epochs(validation_freq), _verbosity(verbose)
    backups = [callback for callback in chosen if isinstance(callback, keras.callbacks.BackupAndRestore)]
    if backups and checkpoint_dir is None:  # checkpoints replace it, with its directory and frequency
        checkpoint_dir, save_freq = str(backups[0].backup_dir), backups[0].save_freq
        options = {**({} if save_freq == "epoch" else {"checkpoint_steps": save_freq}), **options}
    settings = _settings(build_model, epochs=epochs, initial_epoch=initial_epoch, options=options)
    process = loop.this_process(options)
    with process.explain_errors():
        reader = process.data_adapter(settings.seed, batch_size, class_weight)
        if validation_split and validation_data is None:
            train_data, validation_data = reader.split_validation(train_data, validation_split)
        data = reader.read_batches(train_data, "train_data", steps=steps_per_epoch, shuffle=shuffle)
        validation = None
        if validation_data is not None:
            size = validation_batch_size or (
                None if isinstance(validation_data, tf.data.Dataset | keras.utils.PyDataset) else batch_size
            )
            reader = process.data_adapter(settings.seed, size)
            how: dict[str, Any] = {"steps": validation_steps, "restart": True}
            validation = reader.read_batches(validation_data, "validation_data", **how)
            _report_shuffles(process, train_data, validation_data, validation_steps)
        steps = {"train_step": data, **({"test_step": validation} if validation else {})}
        model = build_with_variables(process, build_model, settings, **steps)
        chosen_data = {"data": data, "validation": validation, "validation_freq": frequency}
        run = _make_run(process.for_model(model), settings, checkpoint_dir, **chosen_data)
        _check_same_call(run, model)
        sigterm = during_a_run(settings.grace_period, ends_program=True)
        with undo_patches(model), run.watchdog, sigterm as preemption:
            history = _train(run, model, chosen, preemption, int(initial_epoch), shown)
        run.collectives.barrier()
        if run.cluster.is_chief and not settings.max_steps and not settings.max_time:
            _remove_backups(backups, run.checkpoints)
    return history


def _remove_backups(backups: Sequence[keras.callbacks.BackupAndRestore], checkpoints: Path | None) -> None:
    """Removes the checkpoints after training, as BackupAndRestore does."""
    for backup in backups:
        if backup.delete_checkpoint and files.local_path(str(backup.backup_dir)) == checkpoints:
            shutil.rmtree(checkpoints)


def _report_shuffles(process: loop.Process, train_data: Any, validation_data: Any, steps: int | None) -> None:
    """Warns of a validation on other examples after a resume, as nothing restores the order of a shuffle."""
    orders, others = ({id(each) for each in drawing_datasets(data)} for data in (train_data, validation_data))
    is_part = steps and others and not 0 <= int(validation_data.cardinality()) <= steps
    if process.cluster.is_chief and (is_part or orders & others):
        what = "and train_data draw from one shuffle" if orders & others else "is shuffled anew each time"
        text = f"warning: validation_data {what}, and a resumed run reads other examples"
        progress.report("train", f"{text}; pass reshuffle_each_iteration=False")


def _settings(
    build_model: BuildModel, *, epochs: int, initial_epoch: int, options: Mapping[str, Any]
) -> TrainSettings:
    for taken in sorted({"x", "y", "sample_weight"} & set(options)):
        raise SettingsError(f"fit has no argument {taken!r}; give train_data=(x, y) or (x, y, sample_weight)")
    loop.check_options("fit", options, OPTIONS)
    epochs = check_whole_number("epochs", epochs, least=0)
    if check_whole_number("initial_epoch", initial_epoch, least=0) >= epochs > 0:
        raise SettingsError(
            f"initial_epoch must be 0..{epochs - 1}, below epochs {epochs}, not {initial_epoch}: epochs is "
            "the number of the last epoch, not how many are trained"
        )
    model = plugins.identify(type(build_model) if isinstance(build_model, keras.Model) else build_model)
    return TrainSettings(dataset="", model=model, epochs=epochs, **options)


def _validation_epochs(validation_freq: int | Collection[int]) -> int | Collection[int]:
    """Returns the number of epochs between validations, or the numbers of the epochs to validate."""
    if isinstance(validation_freq, Collection) and not isinstance(validation_freq, str | bytes):
        return frozenset(check_whole_number("validation_freq", epoch) for epoch in validation_freq)
    return check_whole_number("validation_freq", validation_freq)


def _make_run(
    process: loop.Process, settings: TrainSettings, checkpoint_dir: str | Path | None, **data: Any
) -> loop.TrainingRun:
    check_strategy_settings(settings, process.strategy_name)
    limit = settings.stall_timeout if process.cluster.tasks else 0.0
    return loop.TrainingRun(
        **vars(replace(process, settings=settings)),
        checkpoints=files.local_path(str(checkpoint_dir)) if checkpoint_dir else None,
        watchdog=loop.Watchdog(process.cluster.name, limit),
        **data,
    )


def _check_same_call(run: loop.TrainingRun, model: keras.Model) -> None:
    """Raises SettingsError when the call differs between processes, before the first step. A collective."""
    if run.collectives.processes == 1:
        return
    call: dict[str, Any] = {
        **asdict(run.settings),
        "weights": sum(int(np.prod(weight.shape)) for weight in model.weights),
        "steps_per_epoch": run.data.steps,
    }
    config = {"call": call, "data": {}}
    for name, data in (("train_data", run.data), ("validation_data", run.validation)):
        call[name], config["data"][f"a first batch of {name} with sum"] = data.digest if data else ("", "")
    blob = json.dumps(config, default=plugins.identify).encode()
    configs = [json.loads(each) for each in run.collectives.gather_bytes(blob)]
    for name, theirs in zip(run.processes, configs, strict=True):
        if difference := describe_difference(run.cluster.name, configs[run.process], name, theirs):
            raise SettingsError(difference)


def _train(
    run: loop.TrainingRun,
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
    preemption: Preemption,
    initial_epoch: int,
    verbose: int,
) -> keras.callbacks.History:
    history = keras.callbacks.History()
    callbacks = [each for each in callbacks if not isinstance(each, keras.callbacks.BackupAndRestore)]
    has_bar = any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in callbacks)
    bars = [keras.callbacks.ProgbarLogger()] if verbose and run.cluster.is_chief and not has_bar else []
    hooks = Hooks(run, [*callbacks, history], bars, verbose)
    with run.strategy.scope():
        weigh_output_losses(model)

    if isinstance(run.data, BatchSequence):
        run.data.watch(functools.partial(_report_skipping, run))

    training = loop.Training(
        run,
        model,
        hooks,
        data=run.data.description,
        fixed=run.data.fixed,
        preemption=preemption,
        beginning=Position(initial_epoch, 0, initial_epoch * run.data.steps),
        batch=run.data.first_batch,
    )
    with contextlib.closing(training.checkpoints):
        training.train()
    return history


def _report_skipping(run: loop.TrainingRun, done: int, total: int) -> None:
    """Feeds the watchdog, and reports on the chief, while data before a resume is read again."""
    run.watchdog.at(f"skipping data before the resume, {done:,} elements of {total or 'all'} read again")
    if run.cluster.is_chief and done and done != total:
        progress.advance("train", done, max(done, total), "elements", "skipped")
    if 0 < total <= done:
        run.watchdog.rest()  # other processes may still be reading


def _verbosity(verbose: str | int) -> int:
    """Returns `verbose` as a number, "auto" as 1 (a bar) on a terminal or in a notebook, else as 2."""
    if verbose == "auto":
        return 1 if sys.stdout.isatty() or "ipykernel" in sys.modules else 2
    if verbose not in (0, 1, 2):
        raise SettingsError(f'verbose must be "auto", 0, 1 or 2, not {verbose!r}')
    return int(verbose)


def evaluate(
    model: BuildModel,
    data: Any,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    verbose: str | int = "auto",
    **options: Any,
) -> loop.Logs:
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
    shown = _verbosity(verbose)
    with _prepare("evaluate", model, data, batch_size, steps, options) as (process, compiled, batches):
        with process.strategy.scope():
            weigh_output_losses(compiled)
        distributed = batches.distribute(process.strategy, process.process, len(process.processes))
        evaluation = loop.EvaluationLoop(compiled, process.strategy, distributed, batches.steps)
        evaluation.begin()
        for count in _step_counts(batches.steps, process, shown):
            evaluation.take_steps(count)
        return evaluation.read_metrics()


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
    shown = _verbosity(verbose)
    if isinstance(data, str | Path):
        raise SettingsError(
            "predict takes a tf.data.Dataset, a function of an input context, or arrays; for a dataset "
            "directory see the report of 'shardline validate MODEL DATASET OUT'"
        )
    if not callable(data) and not isinstance(data, tf.data.Dataset | keras.utils.PyDataset):
        data = (tuple(data) if isinstance(data, list) else data,)
    with _prepare("predict", model, data, batch_size, steps, options) as (process, loaded, batches):
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


@contextlib.contextmanager
def _prepare(
    call: str, model: BuildModel, data: Any, batch_size: int | None, steps: int | None, options: Any
) -> Iterator[tuple[loop.Process, keras.Model, Batches]]:
    """Yields the process, the built model and the batches of `evaluate` or `predict`."""
    check_counts(batch_size=batch_size, steps=steps)
    loop.check_options(call, options, loop.STRATEGY_SETTINGS)
    process, predicts = loop.this_process(options), call == "predict"
    if process.strategy_name == "parameter_server":
        raise SettingsError(
            f"{call} needs synchronous replicas, but this job has parameter servers; call it in a program of "
            "one process, or of workers only"
        )
    with process.explain_errors():
        adapter = process.data_adapter(0, batch_size)
        batches = adapter.read_batches(data, "data", steps=steps, restart=True, pad=predicts)
        step = {"predict_step" if predicts else "test_step": batches}
        built = build_with_variables(process, model, process.settings, **step)
        with undo_patches(built):
            yield process.for_model(built), built, batches


def _step_counts(steps: int, process: loop.Process, verbose: int) -> Iterator[int]:
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


def _gather(process: loop.Process, data: Batches, parts: Sequence[np.ndarray[Any, Any]]) -> Any:
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
