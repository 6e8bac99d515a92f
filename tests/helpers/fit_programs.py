"""Programs that call `shardline.fit`, each `python -m tests.helpers.fit_programs CASE OUT [OPTION=JSON ...]`.

Each process writes what it has seen to OUT/NAME.json, NAME being its task.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import shardline
from shardline.trainer.base.errors import RestartError
from tests.helpers import custom_train_steps, text_programs
from tests.helpers.losses import train_all

TASK: dict[str, Any] = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
NAME = f"{TASK['type']}-{TASK['index']}" if TASK else "alone"


def arrays(count: int = 103) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = np.random.default_rng(0).normal(size=(count, 6)).astype("float32")
    return x, (x[:, :2].sum(axis=1) > 0).astype("int64")


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays()).shuffle(103, seed=1).batch(16)


def steady() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)]
    return compiled(keras.Sequential(layers), "sgd")


def restless() -> keras.Model:
    """Everything that a run has to remember: statistics, random numbers, moments, a schedule."""
    layers = [
        keras.Input((6,)),
        keras.layers.Dense(8),
        keras.layers.BatchNormalization(name="of_a_part"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(2),
    ]
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, 60)
    return compiled(keras.Sequential(layers), keras.optimizers.Adam(schedule))


def compiled(model: keras.Model, optimizer: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def summary(model: keras.Model) -> list[list[float]]:
    return [weights.ravel().tolist() for weights in model.get_weights()]


def all_kinds(out: Path) -> dict[str, Any]:
    """Trains on each kind of data, evaluates and predicts."""
    found: dict[str, Any] = {}

    def fit(name: str, data: Any, build: Callable[[], keras.Model] = steady, **options: Any) -> keras.Model:
        history = shardline.fit(build, data, epochs=2, verbose=0, **options)
        found[name] = {"weights": summary(history.model), "history": history.history}
        return history.model

    x, y = arrays()
    model = fit("arrays", (x, y), batch_size=16, validation_split=0.2, class_weight={0: 1.0, 1: 2.0})
    fit("dataset", dataset(), validation_data=(x, y), validation_batch_size=10)
    fit("steps", dataset().repeat(), steps_per_epoch=5, gradient_accumulation_steps=2)
    found["evaluate"] = [shardline.evaluate(model, data, verbose=0) for data in ((x, y), dataset())]
    found["predict"] = shardline.predict(model, x, batch_size=10, verbose=0).ravel().tolist()
    found["predict_one"] = shardline.predict(model, x[:1], verbose=0).tolist()

    def pictures() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
        return compiled(keras.Sequential(layers), "sgd")

    directory = str(out / "data")
    judged = fit("directory", directory, pictures, validation_data=directory, batch_size=8)
    found["evaluate"].append(shardline.evaluate(judged, directory, verbose=0))
    return found


def losses(out: Path, names: list[str]) -> dict[str, Any]:
    return train_all(names)


def fit_program(name: str, **options: Any) -> dict[str, Any]:
    """Trains a program that has a training step of its own."""
    program = custom_train_steps.PROGRAMS[name]
    data = program.data()
    if program.validated:
        options["validation_data"] = data
    # The pairs of an anchor and its like are no examples to share out: each replica takes whole batches.
    given = (lambda context: data) if name == "metric_learning" else data
    history = shardline.fit(lambda: program.make(True), given, verbose=0, **options)
    return {"weights": summary(history.model), "history": history.history}


def steps(out: Path, names: list[str]) -> dict[str, Any]:
    return {name: fit_program(name) for name in names}


def by_keras_alone(out: Path, names: list[str]) -> dict[str, Any]:
    """Trains programs on texts by Keras' own `fit`."""
    found: dict[str, Any] = {}
    for name in names:
        program = text_programs.PROGRAMS[name]
        history = program.make(True).fit(program.data(), epochs=3, shuffle=False, verbose=0)
        found[name] = {"weights": summary(history.model), "history": history.history}
    return found


def texts(out: Path, names: list[str], communication: str = "auto") -> dict[str, Any]:
    """Trains programs on texts as Keras does, several steps in a call."""
    return {
        name: text_program(name, True, steps_per_execution=4, communication=communication) for name in names
    }


def text_program(name: str, steady: bool, **options: Any) -> dict[str, Any]:
    program = text_programs.PROGRAMS[name]
    history = shardline.fit(
        lambda: program.make(steady), program.data(), epochs=3, shuffle=False, verbose=0, **options
    )
    return {"weights": summary(history.model), "history": history.history}


def killed_text(out: Path, name: str, kill: str = "") -> dict[str, Any]:
    """Kills one task after step 8."""

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if kill == NAME and self.model.optimizer.iterations == 8:
                os.kill(os.getpid(), signal.SIGKILL)

    return text_program(
        name, False, callbacks=[Kill()], checkpoint_dir=out / "checkpoints", checkpoint_steps=3
    )


def plain(out: Path) -> dict[str, Any]:
    history = shardline.fit(steady, arrays(), batch_size=16, epochs=1, shuffle=False, verbose=0)
    return {"weights": summary(history.model)}


def killed(out: Path, kill: str = "") -> dict[str, Any]:
    """Kills one task after step 17."""

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if kill == NAME and self.model.optimizer.iterations == 17:
                os.kill(os.getpid(), signal.SIGKILL)

    history = shardline.fit(
        restless,
        dataset().repeat(),
        steps_per_epoch=8,
        epochs=4,
        verbose=0,
        validation_data=arrays(),
        callbacks=[Kill(), keras.callbacks.EarlyStopping("val_loss", patience=9)],
        checkpoint_dir=out / "checkpoints",
        checkpoint_steps=3,
    )
    return {"weights": summary(history.model), "history": history.history}


def lost(out: Path) -> dict[str, Any]:
    """Trains again after the worker was killed."""

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if NAME == "worker-0":
                os.kill(os.getpid(), signal.SIGKILL)

    for callbacks in ([Kill()], []):
        try:
            shardline.fit(steady, arrays(), callbacks=callbacks, epochs=2, verbose=0)
        except shardline.ShardlineError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    raise SystemExit(1)


def own_part(out: Path) -> dict[str, Any]:
    """Trains on a function of an input context."""
    seen: list[int] = []

    def note(number: np.int64) -> np.int64:
        seen.append(int(number))
        return number

    def pair(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        noted = tf.ensure_shape(tf.numpy_function(note, [number], tf.int64), [])
        return tf.fill([6], tf.cast(noted, tf.float32) / 40), noted % 2

    def of_context(context: tf.distribute.InputContext) -> tf.data.Dataset:
        part = tf.data.Dataset.range(40).shard(context.num_input_pipelines, context.input_pipeline_id)
        return part.shuffle(40, seed=1).map(pair).batch(context.get_per_replica_batch_size(8))

    history = shardline.fit(steady, of_context, epochs=1, verbose=0)
    return {"seen": sorted(set(seen)), "history": history.history}


def callbacks(out: Path) -> dict[str, Any]:
    """One replica stops the training; another decides nothing; the chief alone writes."""
    calls: list[str] = []
    x, y = arrays()
    reads: list[Any] = []

    class Reads(keras.callbacks.Callback):
        """Uses the model as in one process."""

        on = "chief"

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            rate = self.model.optimizer.learning_rate
            self.model.evaluate(x, y, batch_size=32, verbose=0)
            reads.append([float(rate), float(np.asarray(rate)), int(self.model.optimizer.iterations)])

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 2 and NAME == "worker-0"

    path = out / NAME
    path.mkdir()
    found = [
        Stop(),
        Reads(),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0),
        keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, start_from_epoch=2),
        keras.callbacks.ModelCheckpoint(path / "{epoch}.keras"),
        keras.callbacks.CSVLogger(path / "log.csv"),
        keras.callbacks.TensorBoard(path / "board"),
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: calls.append(f"{batch} {sorted(logs)}")
        ),
    ]
    history = shardline.fit(steady, arrays(), batch_size=32, epochs=9, callbacks=found, verbose=0)
    files = sorted(str(file.relative_to(path).parts[0]) for file in path.iterdir())
    return {
        "history": history.history,
        "rate": float(history.model.optimizer.learning_rate),
        "files": files,
        "calls": calls,
        "reads": reads,
        **by_keras(history.model, x, y),
    }


def by_keras(model: keras.Model, x: Any, y: Any) -> dict[str, Any]:
    """Calls Keras' own methods on the chief alone, and compares them with what all compute together."""
    found: dict[str, Any] = {}
    if NAME == "chief-0":
        found["evaluate"] = model.evaluate(x, y, batch_size=32, verbose=0, return_dict=True)
        found["test_on_batch"] = model.test_on_batch(x, y, return_dict=True)
        found["predict"] = model.predict(x, batch_size=32, verbose=0).ravel().tolist()
        found["predict_on_batch"] = model.predict_on_batch(x).ravel().tolist()
    for train in (model.train_on_batch, model.fit):
        try:
            train(x, y)
        except shardline.ShardlineError as error:
            found[train.__name__] = str(error)
    found["all"] = shardline.evaluate(model, (x, y), verbose=0)
    found["all_predict"] = shardline.predict(model, x, verbose=0).ravel().tolist()
    return found


def different(out: Path, argument: str = "") -> dict[str, Any]:
    """Calls that are not the same on all processes."""
    mine = NAME == "worker-0"
    x, y = arrays()
    if argument == "data" and mine:
        x = x + 1
    options = {"epochs": 3 if argument == "epochs" and mine else 2}
    if argument == "callback":
        options["callbacks"] = [Failing()] if mine else []
    shardline.fit(steady, (x, y), verbose=0, **options)
    return {}


class Failing(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise ZeroDivisionError("a callback of the user's")


def main() -> None:
    case, out, *options = sys.argv[1:]
    given = {name: json.loads(value) for name, value in (option.split("=", 1) for option in options)}
    if TASK:
        shardline.strategy(communication=given.get("communication", "auto"))
    try:
        found = CASES[case](Path(out), **given)
    except shardline.ShardlineError as error:
        if isinstance(error, RestartError):
            raise  # which ends a program that catches nothing as it should
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.last_value = error
        raise SystemExit(error.exit_code) from None
    (Path(out) / f"{NAME}.json").write_text(json.dumps(found))


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each
    for each in (
        *(
            all_kinds,
            losses,
            steps,
            by_keras_alone,
            texts,
            killed_text,
            plain,
            killed,
            lost,
            own_part,
            callbacks,
            different,
        ),
    )
}

if __name__ == "__main__":
    main()
