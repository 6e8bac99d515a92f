"""The main job, `make run`, against a bare script that does the same work in one process.

python -m benchmarks.whole --rounds 3

Ours runs compiled/retrain.yaml: a pipeline of processes that preprocess the digits, train on a chief and a
worker, export, judge and register. The script reads the same digits into memory, trains the same network with
Keras' own fit for as many epochs with the same global batch, exports a SavedModel, loads it, and evaluates it
on the test examples as PNG. They take turns.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SCRIPT = """
import sys
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, confusion_matrix

digits = load_digits()
images = np.rint(digits.images * 255 / 16).astype(np.uint8)[..., None]
order = np.random.default_rng(0).permutation(len(images))
train, validation, test = np.split(order, [1444, 1630])
model = keras.Sequential([
    keras.Input(images.shape[1:], dtype="uint8"),
    keras.layers.Rescaling(1 / 255),
    keras.layers.Conv2D(32, 3, activation="relu"),
    keras.layers.MaxPooling2D(),
    keras.layers.Flatten(),
    keras.layers.Dense(64, activation="relu"),
    keras.layers.Dense(10, activation="softmax"),
])
model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(images[train], digits.target[train], batch_size=32, epochs=20, verbose=0,
          validation_data=(images[validation], digits.target[validation]))
model.save(sys.argv[1] + "/model.keras")

@tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
def serve(encoded):
    decode = lambda one: tf.ensure_shape(tf.io.decode_png(one, 1), images.shape[1:])
    return model(tf.map_fn(decode, encoded, fn_output_signature=tf.uint8))

tf.saved_model.save(model, sys.argv[1] + "/saved", signatures=serve)
loaded = tf.saved_model.load(sys.argv[1] + "/saved").signatures["serving_default"]
stored = [tf.io.encode_png(images[i]).numpy() for i in test]
answers = []
for start in range(0, len(stored), 32):
    found = loaded(tf.constant(stored[start:start + 32]))
    answers += next(iter(found.values())).numpy().argmax(1).tolist()
print(accuracy_score(digits.target[test], answers), confusion_matrix(digits.target[test], answers).shape)
"""


def main() -> None:
    """Measures and prints medians and spreads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"make run": [], "script": []}
    with tempfile.TemporaryDirectory(prefix="whole-") as name:
        script = Path(name) / "script.py"
        script.write_text(_SCRIPT)
        shardline = [sys.executable, "-c", "from shardline.pipelines.cli.main import main; main()"]
        commands = {
            "make run": [*shardline, "run", "compiled/retrain.yaml", "--runs-dir", f"{name}/runs"],
            "script": [sys.executable, str(script), name],
        }
        for _ in range(options.rounds):
            for kind, command in commands.items():
                started = time.monotonic()
                subprocess.run(command, check=True, capture_output=True)
                found[kind].append(time.monotonic() - started)
                print(f"{kind}: {found[kind][-1]:.1f} s", flush=True)
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    for kind, values in found.items():
        print(f"{kind}: {medians[kind]:.1f} s ({min(values):.1f}-{max(values):.1f})")
    print(f"ratio {medians['make run'] / medians['script']:.2f}")


if __name__ == "__main__":
    main()
