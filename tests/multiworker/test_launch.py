"""`shardline.launch` with programs of TensorFlow: Shardline's fit, and TensorFlow's own strategy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardline

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]

#: Makes tensors before it trains; the worker ends by a signal in its ninth step, once.
_PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import keras
import tensorflow as tf
import shardline

x = tf.random.stateless_uniform((64, 4), seed=(1, 2))
data = tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, axis=1))).shuffle(64, seed=1).batch(16)

def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model

class End(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("type")
        if self.steps == 9 and task == "worker" and not Path("ended").exists():
            Path("ended").touch()
            os.kill(os.getpid(), int(sys.argv[1]))

options = {"checkpoint_dir": "checkpoints", "checkpoint_steps": 2, "grace_period": 20}
history = shardline.fit(build, data, epochs=4, verbose=0, callbacks=[End()], **options)
print("loss", history.history["loss"][-1])
"""

_OWN_STRATEGY = """
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()

@tf.function
def add():
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones(())))

print("sum", float(strategy.experimental_local_results(add())[0]))
"""


def _number(log: Path, name: str) -> float:
    (found,) = re.findall(rf"^{name} (\S+)$", log.read_text(), re.MULTILINE)
    return float(found)


@pytest.fixture(scope="module")
def loss_of_one(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The last loss of the program in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("one"))
        Path("program.py").write_text(_PROGRAM)
        shardline.launch("program.py", replicas=1, logs="logs")
        return _number(Path("logs/chief-0.log"), "loss")


@pytest.mark.parametrize(
    ("signum", "restarts", "words"),
    [
        pytest.param(
            9,
            1,
            r"worker-0 was killed by SIGKILL after \d+ s; all replicas restart \(restart 1 of 1\)",
            marks=pytest.mark.matrix,
        ),
        (
            15,
            0,
            r"(?s)for at most 20 s\n.* asked for a restart .*; all replicas restart \(preemption 1 of 6\)",
        ),
    ],
)
def test_a_program_that_fits_resumes_where_it_was_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    loss_of_one: float,
    signum: int,
    restarts: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(_PROGRAM)
    shardline.launch("program.py", replicas=2, arguments=[str(signum)], restarts=restarts, logs="logs")
    assert Path("ended").exists()
    assert re.search(words, capsys.readouterr().out)
    for name in ("chief-0", "worker-0"):
        assert _number(Path("logs", f"{name}.log"), "loss") == pytest.approx(loss_of_one, rel=1e-5)


def test_a_program_with_tensorflows_own_strategy(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_OWN_STRATEGY)
    shardline.launch(tmp_path / "program.py", replicas=2, logs=tmp_path / "logs")
    assert [_number(tmp_path / "logs" / f"{name}-0.log", "sum") for name in ("chief", "worker")] == [2, 2]
