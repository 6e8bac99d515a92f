"""Each workaround for Keras or TensorFlow is still needed: a failing test names one that may be removed."""

import functools
import logging
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.keras_compat import keras_internals, tensorflow_internals


def test_keras_builds_no_optimizer_and_no_metric_with_the_model():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    model.build((None, 2))
    assert not model.optimizer.built

    keras_internals.build_symbolically(model, (np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32)))
    assert model.optimizer.built
    assert "mae" in model.get_metrics_result()


def test_keras_forgets_the_requested_jit_compile():
    compiled = []
    for jit_compile in ("auto", False):
        with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), keras_internals.record_jit_compile():
            compiled.append(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
            compiled[-1].compile("sgd", "mse", jit_compile=jit_compile)
    assert [model.jit_compile for model in compiled] == [False, False]
    assert [keras_internals.requested_jit_compile(model) for model in compiled] == ["auto", False]


def test_keras_averages_the_losses_of_outputs_over_batches():
    """Batches of 2 and 1 examples with errors 0, 0 and 3: a mean of 1, and for Keras of 1.5."""

    def measured(weigh):
        inputs = keras.Input((1,))
        model = keras.Model(inputs, {"a": keras.layers.Identity(name="a")(inputs), "b": inputs * 1.0})
        model.compile(loss={"a": "mae", "b": "mae"})
        y = tf.constant([[0.0], [0.0], [3.0]])
        keras_internals.build_symbolically(model, (y, {"a": y, "b": y}))
        if weigh:
            keras_internals.weigh_output_losses(model)
        step = tf.function(
            model.test_step,
            input_signature=[(tf.TensorSpec([None, 1]), dict.fromkeys("ab", tf.TensorSpec([None, 1])))],
        )
        model.reset_metrics()
        for part in (y[:2], y[2:]):
            step((tf.zeros_like(part), {"a": part, "b": part}))
        return float(model.get_metrics_result()["a_loss"])

    assert measured(weigh=False) == pytest.approx(1.5)
    assert measured(weigh=True) == pytest.approx(1.0)


def test_keras_saves_no_model_whose_loss_has_no_form_in_a_file(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", functools.partial(keras.losses.huber, delta=2.0))
    with pytest.raises(TypeError, match=r"Cannot serialize object functools\.partial"):
        model.save(tmp_path / "model.keras")

    with keras_internals.saveable(model):
        model.save(tmp_path / "model.keras")
    assert not keras.models.load_model(tmp_path / "model.keras").compiled
    assert keras_internals.compiled_losses(model)


def test_keras_remembers_the_logits_behind_a_sigmoid_and_a_softmax():
    inputs = np.zeros((1, 2), np.float32)
    for activation, remembered in (("sigmoid", True), ("softmax", True), ("relu", False)):
        outputs = keras.Sequential([keras.layers.Dense(2, activation)])(inputs)
        assert (keras_internals.attached_logits(outputs) is not None) is remembered


def test_a_stateless_scope_keeps_every_assignment_back():
    kept, counter, shared = (keras.Variable(1.0), keras.Variable(1, dtype="int32"), keras.Variable(1.0))
    with keras.StatelessScope():
        shared.assign(5.0)
    assert float(shared.value) == 1.0

    with keras_internals.OwnMetrics([kept], [counter]) as scope:
        kept.assign(kept + 2.0)
        counter.assign(counter + 1)
        shared.assign(5.0)
    assert float(scope.get_current_value(kept)) == 2.0
    assert [float(one.value) for one in (kept, counter, shared)] == [1.0, 2.0, 5.0]


def test_lost_workers_are_reported_and_nothing_else():
    lines = []
    logger = logging.getLogger("tensorflow")
    before = logger.level, list(logger.filters)
    logger.filters.clear()  # of a training in this process, which took such lines for itself
    tensorflow_internals.report_workers(lines.append)
    try:
        logger.error("Worker %s failed with %r", "/job:worker/replica:0/task:1", "an error")
        logger.info("Worker %s has been recovered.", "/job:worker/replica:0/task:1")
        logger.error("anything else")
    finally:
        logger.setLevel(before[0])
        logger.filters[:] = before[1]
    assert lines == ["worker-1 is lost; the other workers take over its step", "worker-1 is back"]


def test_an_import_of_tensorflow_prints_notices_and_loads_unused_modules():
    program = (
        "import os, sys\n"
        "os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        "import tensorflow as tf, keras, importlib.util as u\n"
        "print([m for m in ('sklearn', 'matplotlib') if u.find_spec(m) and m not in sys.modules])\n"
    )
    plain = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    start = "from shardline.trainer.keras_compat import tensorflow_internals as t\nt.import_tensorflow()\n"
    quiet = subprocess.run(
        [sys.executable, "-c", start + program.replace("m not in", "m in")],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert plain.stderr.strip()  # tensorflow/tensorflow#100442
    assert plain.stdout.strip() == "[]"
    assert (quiet.stdout.strip(), quiet.stderr) == ("[]", "")


def test_updates_wait_for_all_gradients():
    """Those of Keras do, too, by an IdentityN, which TensorFlow's optimizer of graphs takes away."""
    optimizer, applied = keras.optimizers.SGD(), []
    optimizer.apply = lambda gradients, _: applied.extend(gradients)
    keras_internals.update_after_gradients(optimizer)

    @tf.function(autograph=False)
    def step(value):
        sparse = tf.IndexedSlices(tf.sqrt(value), tf.constant([0]), tf.constant([3]))
        optimizer.apply([tf.exp(value), None, sparse])

    step.get_concrete_function(tf.TensorSpec([1]))
    assert applied[1] is None
    assert isinstance(applied[2], tf.IndexedSlices)
    for one in (applied[0], applied[2].values):
        assert {"Exp", "Sqrt"} <= {op.type for op in (one.op.inputs[0].op, *one.op.control_inputs)}


@pytest.mark.parametrize(
    ("indices", "same"),
    [
        (lambda words, table: tf.range(tf.shape(words)[1]), True),
        (lambda words, table: tf.reshape(table, [-1]), True),
        (lambda words, table: tf.reshape(words, [-1]), False),
        (lambda words, table: tf.range(tf.reduce_max(words)), False),
        (lambda words, table: tf.random.uniform([3], 0, 3, tf.int32), False),
    ],
    ids=["positions", "captured", "words", "of_values", "random"],
)
def test_it_is_known_which_rows_depend_on_the_examples(indices, same):
    """Within a loop over batches, as steps are."""
    table, found = tf.range(200), []
    batches = iter(tf.data.Dataset.from_tensors(tf.ones([4, 3], tf.int32)).repeat())

    def step(i):
        found.append(tensorflow_internals.is_same_for_examples(indices(next(batches), table)))
        return (i + 1,)

    tf.function(lambda: tf.while_loop(lambda i: i < 2, step, [0]), autograph=False).get_concrete_function()
    assert found == [same]
