"""Chief, workers and parameter servers as real processes: exact counts, and the effect of a lost one."""

import json
import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.cluster import ClusterConfig
from shardline.trainer.loop.parameter_server import CoordinatorLoop, Workers, WorkerStep
from tests.helpers import programs
from tests.helpers.parameter_server import BATCH, RECORDS, SIZES, decode, make_model, raw_batches
from tests.helpers.replicas import ROOT, free_ports, proxied_environ

pytestmark = pytest.mark.multiworker


class Job:
    """Processes of one cluster, and what the chief says."""

    def __init__(self, mode, out, workers=2, servers=1):
        hosts = [f"127.0.0.1:{port}" for port in free_ports(1 + workers + servers)]
        self.cluster = {"chief": hosts[:1], "worker": hosts[1 : 1 + workers], "ps": hosts[1 + workers :]}
        self._arguments = [mode, str(out)]
        self.processes = {}
        for kind, addresses in self.cluster.items():
            for index in range(len(addresses)):
                self.start(kind, index)

    def start(self, kind, index, **environ):
        task = {"type": kind, "index": index}
        self.processes[kind, index] = programs.Popen(
            [sys.executable, "-m", "tests.helpers.parameter_server", *self._arguments],
            env={
                **proxied_environ(),
                "PYTHONPATH": str(ROOT),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CONFIG": json.dumps({"cluster": self.cluster, "task": task}),
                **environ,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        return self.processes[kind, index]

    def kill(self, kind, index):
        self.processes[kind, index].kill()
        self.processes[kind, index].communicate(timeout=60)

    def expect(self, kind):
        """Returns the next thing of that kind that the chief says."""
        heard = []
        for line in self.processes["chief", 0].stdout:
            heard.append(line)
            if line.startswith(f'{{"kind": "{kind}"'):
                return json.loads(line)
        raise AssertionError("".join(heard)[-5000:])

    def finish(self, *members):
        """Returns the exit codes of processes when they have ended by themselves."""
        codes = {}
        for member in members or self.processes:
            output, _ = self.processes[member].communicate(timeout=90)
            codes[member] = self.processes[member].returncode
            if codes[member]:
                print(member, output[-3000:])
        return codes

    def stop(self):
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(mode, **options):
        jobs.append(Job(mode, tmp_path, **options))
        return jobs[-1]

    yield start
    for one in jobs:
        one.stop()


def reference(epochs=2):
    """The same steps in this process, one after the other."""
    model = make_model()
    step = tf.function(model.train_step, reduce_retracing=True)
    for _ in range(epochs):
        model.reset_metrics()
        for raw in raw_batches():
            step(decode(raw))
    return model, {name: float(value) for name, value in model.get_metrics_result().items()}


def test_one_worker_trains_what_one_device_trains(job, tmp_path):
    running = job("train", workers=1)
    running.expect("metrics")
    metrics = running.expect("metrics")
    evaluation = running.expect("evaluation")
    assert set(running.finish().values()) == {0}

    model, expected = reference()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-5), name
    saved = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(saved.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert evaluation["sum"] == sum(np.arange(RECORDS) % 3)


def test_two_workers_and_two_servers_count_everything_once(job, tmp_path):
    running = job("train_on", workers=2, servers=2)
    for epoch in (1, 2):
        expected = {"kind": "epoch", "diverged": None, "iterations": epoch * len(SIZES)}
        assert running.expect("epoch") == expected
        metrics = running.expect("metrics")
        assert metrics["sum"] == sum(np.arange(RECORDS) % 3)
        assert epoch == 1 or metrics["loss"] < 1.1
    evaluation = running.expect("evaluation")
    devices = running.expect("devices")["devices"]
    broken = running.expect("broken")
    assert set(running.finish().values()) == {0}

    assert [device.split("/")[1:4:2] for device in devices] == [["job:ps", "task:0"], ["job:ps", "task:1"]]
    assert broken == {"kind": "broken", "diverged": 0}
    saved = keras.models.load_model(tmp_path / "model.keras")
    images, labels = zip(*map(decode, raw_batches()), strict=True)
    again = saved.evaluate(tf.concat(images, 0), tf.concat(labels, 0), BATCH, verbose=0, return_dict=True)
    for name, value in again.items():
        assert evaluation[name] == pytest.approx(value, abs=1e-5), name


def test_a_worker_may_die_and_come_back_but_a_parameter_server_may_not(job):
    running = job("survive")
    chief = running.processes["chief", 0]
    running.expect("training")
    running.kill("worker", 1)
    chief.stdin.write("\n")
    chief.stdin.flush()
    running.expect("gone")
    running.start("worker", 1)
    back = running.expect("back")
    assert back["events"].count("worker-1 is lost; the other workers take over its step") == 1
    assert back["sum"] == sum(np.arange(RECORDS) % 3)
    running.kill("ps", 0)
    message = running.expect("failed")["message"]
    assert message.startswith(f"parameter server ps-0 ({running.cluster['ps'][0]}) is gone, and the weights")
    assert running.finish(("chief", 0), ("worker", 0), ("worker", 1)) == {
        ("chief", 0): 0,
        ("worker", 0): 0,
        ("worker", 1): 0,
    }


def test_a_run_without_any_worker_ends(job):
    running = job("alone", workers=1)
    running.expect("training")
    running.kill("worker", 0)
    assert running.expect("failed")["message"].startswith("no worker has answered for 2 s, of 127.0.0.1:")
    assert running.finish(("chief", 0), ("ps", 0)) == {("chief", 0): 0, ("ps", 0): 0}


def test_servers_say_what_is_wrong_and_do_not_outlive_their_chief(job):
    running = job("hang", workers=1)
    running.expect("training")
    worker, server = (running.processes[member] for member in (("worker", 0), ("ps", 0)))

    second = running.start("ps", 0)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 1
    assert f"ps-0 cannot listen on {running.cluster['ps'][0]}" in output

    for process in (worker, server):
        assert any("serves the chief" in line for line in iter(process.stdout.readline, ""))
    running.kill("chief", 0)
    for process in (worker, server):
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "ends, as the chief has" in output

    late = running.start("worker", 0, STARTUP_TIMEOUT="1")
    output, _ = late.communicate(timeout=60)
    assert late.returncode == 1
    assert f"worker-0 has waited 1 s for the chief at {running.cluster['chief'][0]}" in output


class AtOnce:
    """A coordinator whose only worker is this process."""

    def __init__(self, strategy):
        pass

    def schedule(self, function, args):
        return SimpleNamespace(fetch=lambda: function(*args).numpy())

    def done(self):
        return True


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(tf.distribute.coordinator, "ClusterCoordinator", AtOnce)
    cluster = ClusterConfig("chief", 0, ("127.0.0.1:1", "127.0.0.1:2"), ("127.0.0.1:3",))
    return Workers(tf.distribute.get_strategy(), cluster)


def test_of_a_steps_own_logs_those_of_known_shape_are_shown(workers):
    model = make_model()
    train_step = model.train_step

    def own_step(data):
        train_step(data)
        kind, labels = tf.constant("sick"), tf.cast(data[1], tf.float32)
        return {"loss": 0.5, "pair": tf.constant([1, 2]), "kind": kind, "each": labels}

    model.train_step = own_step
    loop = CoordinatorLoop(model, workers, raw_batches(), decode)
    loop.train(SIZES[:3])
    logs = loop.read_metrics()
    assert logs.keys() == {"loss", "pair"}
    assert (logs["loss"], logs["pair"].tolist()) == (0.5, [1.0, 2.0])


def test_a_step_that_returns_no_dict_is_refused(workers):
    model = make_model()
    model.train_step = lambda data: [0.5]
    with pytest.raises(ModelError, match="of the model returned list, not a dict"):
        CoordinatorLoop(model, workers, raw_batches(), decode)


def test_a_mistake_in_taking_an_outcome_ends_the_run(workers):
    step = WorkerStep(lambda batch: tf.zeros([3]), 1, {"each": (None,)})
    with pytest.raises(TypeError):
        list(workers.run_steps(step, [0]))


def test_accumulation_inside_of_a_scaled_loss_is_refused():
    model = make_model()
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "sparse_categorical_crossentropy")
    with pytest.raises(SettingsError, match="parameter_server cannot accumulate gradients"):
        CoordinatorLoop(model, None, raw_batches(), decode)
