"""Memory that a checkpoint takes beyond the model, when it is saved and when it is restored.

shardline launch 2 -m -- benchmarks.checkpoint_memory --megabytes 400 --optimizer sgd

Every process prints the peak in times of the variables (weights and slots), as JSON; with the best weights of
EarlyStopping, whose own copy is not counted. Every variable is updated while the checkpoint is written.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from shardline.trainer.keras_compat import tensorflow_internals


def _status(key: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{key}:")[2].split()[0]) / 1024


def _begin() -> float:
    """Resets the peak of this process to the memory in use, and returns that, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _build(process: Any, megabytes: int, optimizer: str) -> Any:
    import keras

    class Weights(keras.layers.Layer):  # type: ignore[misc]  # keras has no types
        def build(self, shape: Any) -> None:
            for index in range(8):
                self.add_weight(shape=(1024, megabytes * 32), initializer="ones", name=f"weight_{index}")

        def call(self, inputs: Any) -> Any:
            return inputs

    with process.strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Weights()])
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def measure(directory: Path, megabytes: int, optimizer: str, *, restore: bool) -> dict[str, Any]:
    """Saves or restores a checkpoint, and returns what this process took."""
    import keras
    import tensorflow as tf

    from shardline.trainer.base.settings import TrainSettings
    from shardline.trainer.checkpoint import Checkpoints, Identity, Position, TrainingState
    from shardline.trainer.loop import this_process

    process = this_process({})
    chief, model = process.cluster.is_chief, _build(process, megabytes, optimizer)
    early = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    early.set_model(model)
    early.on_train_begin()
    state = TrainingState(model, [early])
    settings = TrainSettings(dataset="data", model="model", keep_checkpoints=1)
    checkpoints = Checkpoints(settings, directory, Identity("model", "data", state.variables), write=chief)
    own = [process.strategy.experimental_local_results(each.value)[0] for each in state._variables.values()]
    change, total = tf.ones(model.weights[0].shape), sum(each.numpy().nbytes for each in own) / 2**20
    if not restore:
        early.best_weights = model.get_weights()
        state.capture(Position(), whole=chief)  # traces
    process.collectives.barrier()
    before = _begin()
    if restore:
        state.restore(checkpoints.read_snapshot(1))
        before += sum(each.nbytes for each in early.best_weights) / 2**20
    else:
        snapshot = state.capture(Position(steps=1), whole=chief)
        assert not state.first_not_finite(snapshot)
        state.check_replicas(snapshot, process.collectives)
        checkpoints.save(snapshot)
        del snapshot
        for variable in own:
            if variable.shape == change.shape:
                variable.assign_add(change)
        checkpoints.wait()
    peak = _status("VmHWM") - before
    process.collectives.barrier()
    checkpoints.close()
    value = {"restore" if restore else "save": round(peak / total, 2), "variables": f"{total:,.0f} MiB"}
    return {"replica": process.cluster.name, **value, "weight": float(np.mean(early.best_weights[0][0, :1]))}


def main() -> None:
    """Measures and prints it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--directory", default=f"{tempfile.gettempdir()}/checkpoint-memory")
    parser.add_argument("--restore", action="store_true")
    options = parser.parse_args()
    tensorflow_internals.import_tensorflow()
    directory = Path(options.directory)
    found = measure(directory, options.megabytes, options.optimizer, restore=options.restore)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
