"""What a model asks of `compile` beside optimizer, loss and metrics: done, or refused before training."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.data.manifest import load
from shardline.trainer.errors import ModelError, SettingsError
from shardline.trainer.models.build import build
from shardline.trainer.settings import TrainSettings
from shardline.trainer.train import _uses_xla, train
from tests.helpers import models
from tests.helpers.datasets import write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory)
    return directory


def settings(dataset, **changes):
    return TrainSettings(**{"dataset": str(dataset), "model": "tests.helpers.models:plain", **changes})


def uses_xla(dataset, name="plain", strategy="one_device", jit_compile="auto", **hparams):
    run = SimpleNamespace(settings=settings(dataset, jit_compile=jit_compile), strategy_name=strategy)
    return _uses_xla(run, build(f"tests.helpers.models:{name}", load(dataset).info(), hparams))


def test_xla_compiles_where_it_is_asked_to_and_else_on_a_gpu(dataset, monkeypatch):
    assert not uses_xla(dataset)
    assert uses_xla(dataset, jit_compile="on")
    assert uses_xla(dataset, "asking_for_xla")
    assert not uses_xla(dataset, "asking_for_xla", jit_compile="off")

    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["a GPU"] if kind == "GPU" else [])
    assert uses_xla(dataset)
    assert not uses_xla(dataset, jit_compile="off")
    assert not uses_xla(dataset, "refusing_xla")
    assert not uses_xla(dataset, strategy="multi_worker_mirrored")


@pytest.mark.parametrize(("name", "option"), [("asking_for_xla", "jit_compile"), ("eager", "run_eagerly")])
def test_what_several_replicas_cannot_do_is_refused(dataset, name, option):
    with pytest.raises(
        ModelError, match=rf"compile\({option}=True\) needs strategy one_device.*has mirrored"
    ):
        uses_xla(dataset, name, strategy="mirrored")


def test_xla_cannot_compile_what_runs_eagerly(dataset):
    with pytest.raises(SettingsError, match="exclude each other"):
        uses_xla(dataset, "eager", jit_compile="on")


def test_a_step_that_is_to_run_eagerly_does(dataset, tmp_path):
    models.Eager.steps = 0
    made = settings(dataset, model="tests.helpers.models:eager", model_dir=str(tmp_path), epochs=2)
    logs = train(made, {}, Preemption(made.grace_period))

    assert models.Eager.steps == 12
    assert logs["val_accuracy"] > 0.3
