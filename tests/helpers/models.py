"""Model functions that tests train, some of them wrong on purpose."""

import keras
import numpy as np

LOSS = "sparse_categorical_crossentropy"


def _sequential(layers, dataset, activation="softmax", classes=None, **options):
    first = [keras.Input(dataset.input_shape, dtype="uint8"), keras.layers.Rescaling(1 / 255)]
    head = keras.layers.Dense(classes or dataset.num_classes, activation, **options)
    return keras.Sequential([*first, *layers, keras.layers.Flatten(), head])


def _compiled(layers, dataset, learning_rate=1e-2, classes=None):
    model = _sequential(layers, dataset, classes=classes)
    model.compile(keras.optimizers.Adam(learning_rate), LOSS, metrics=["accuracy"])
    return model


def synchronized(dataset, learning_rate=1e-2):
    """BatchNormalization over the global batch.

    Without a bias before it: its gradient is rounding noise, which Adam would blow up to whole steps.
    """
    layers = [keras.layers.Conv2D(4, 3, use_bias=False), keras.layers.BatchNormalization(synchronized=True)]
    return _compiled(layers, dataset, learning_rate)


def scheduled(dataset):
    """As `synchronized`, with a learning rate that falls from update to update."""
    model = synchronized(dataset)
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, decay_steps=30)
    model.compile(keras.optimizers.Adam(schedule), LOSS, metrics=["accuracy"])
    return model


def momentless(dataset, learning_rate=1e-2):
    """Plain BatchNormalization that remembers the last batch of its own replica alone."""
    return _compiled([keras.layers.BatchNormalization(momentum=0.0, name="bn")], dataset, learning_rate)


@keras.saving.register_keras_serializable("tests")
class OwnStep(keras.Model):
    """A model with a train_step of its own: a subclass, not yet built, that halves its loss."""

    def __init__(self, classes, **kwargs):
        super().__init__(**kwargs)
        self.classes = classes
        self.layers_of = keras.Sequential(
            [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(classes, "softmax")]
        )

    def call(self, inputs):
        return self.layers_of(inputs)

    def train_step(self, data):
        import tensorflow as tf

        images, labels = data
        with tf.GradientTape() as tape:
            predicted = self(images, training=True)
            loss = 0.5 * self.compute_loss(y=labels, y_pred=predicted)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(images, labels, predicted)

    def get_config(self):
        return {**super().get_config(), "classes": self.classes}


def own_step(dataset):
    model = OwnStep(dataset.num_classes)
    model.compile("adam", LOSS, metrics=["accuracy"])
    return model


def dropout(dataset, rate=0.5):
    return _compiled([keras.layers.Dropout(rate)], dataset)


def leaving(dataset):
    raise SystemExit(0)


@keras.saving.register_keras_serializable()
class Leaving(keras.layers.Layer):
    def call(self, x, training=False):
        if training:
            raise SystemExit(0)
        return x


def leaving_while_it_trains(dataset):
    return _compiled([Leaving()], dataset)


def uncompiled(dataset):
    return keras.Sequential([keras.Input(dataset.input_shape), keras.layers.Flatten()])


def wrong_classes(dataset):
    return _compiled([], dataset, classes=dataset.num_classes + 4)


def wrong_input(dataset):
    inputs = keras.Input((5, 5, 1))
    model = keras.Model(inputs, keras.layers.Dense(dataset.num_classes)(keras.layers.Flatten()(inputs)))
    model.compile("adam", "mse")
    return model


def undeclared_logits(dataset):
    model = _sequential([], dataset, activation=None)
    model.compile("adam", LOSS)
    return model


def unknown_optimizer(dataset):
    model = keras.Sequential([keras.Input(dataset.input_shape), keras.layers.Flatten()])
    model.compile({"class_name": "Admm", "config": {}}, "mse")
    return model


def unknown_loss(dataset):
    model = _compiled([], dataset)
    model.compile("adam", "sparse_crossentropie")
    return model


def two_outputs(dataset):
    images = keras.Input(dataset.input_shape, dtype="uint8")
    features = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(images))
    outputs = [keras.layers.Dense(dataset.num_classes, "softmax")(features) for _ in range(2)]
    model = keras.Model(images, outputs)
    model.compile("adam", [LOSS] * 2)
    return model


def _of_a_column(name, dataset, classes=None, kind=list):
    column = keras.Input((), name=name, dtype="int64")
    number = keras.ops.expand_dims(keras.ops.cast(column, "float32"), -1)
    outputs = keras.layers.Dense(classes or dataset.num_classes, "softmax")(number)
    model = keras.Model([column] if kind is list else {name: column}, outputs)
    model.compile("adam", LOSS)
    return model


def by_year(dataset, classes=None):
    return _of_a_column("year", dataset, classes)


def by_height(dataset):
    return _of_a_column("height", dataset)


def by_dict_of_year(dataset):
    return _of_a_column("year", dataset, kind=dict)


def plain(dataset):
    """One dense layer and plain SGD: accumulated gradients are exactly those of a larger batch."""
    model = _sequential([], dataset, kernel_initializer="zeros")
    model.compile(keras.optimizers.SGD(0.1), LOSS, metrics=["accuracy"])
    return model


def restless(dataset):
    """Every kind of state: statistics of each replica, random state, moments."""
    layers = [
        keras.layers.Conv2D(4, 3, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dropout(0.3),
    ]
    return _compiled(layers, dataset, 3e-3)


def plateau():
    """Halves the learning rate early, so that a forgotten wait would show."""
    return keras.callbacks.ReduceLROnPlateau("val_accuracy", factor=0.5, patience=1, min_delta=0.02)


def exploding(dataset):
    """Its first update makes every weight infinite."""
    model = plain(dataset)
    model.compile(keras.optimizers.SGD(1e38), LOSS)
    return model


def several(dataset):
    """Two inputs, two outputs of different kinds, clipped SGD."""
    images = keras.Input(dataset.input_shape, dtype="uint8", name="images")
    mean = keras.Input((1,), name="mean")
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(images))
    joined = keras.layers.Concatenate()([flat, mean])
    outputs = {
        "label": keras.layers.Dense(dataset.num_classes, "softmax", name="label")(joined),
        "brightness": keras.layers.Dense(1, name="brightness")(joined),
    }
    model = keras.Model({"images": images, "mean": mean}, outputs)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
        {"label": LOSS, "brightness": "mse"},
        metrics={"label": "accuracy"},
    )
    return model


def several_inputs(x, y):
    """What `several` takes: two inputs, two targets, and a sample weight for each target."""
    import tensorflow as tf

    mean = tf.reduce_mean(tf.cast(x, tf.float32), axis=(1, 2, 3))[:, None] / 255
    weight = 1.0 + tf.cast(y, tf.float32)
    targets = {"label": y, "brightness": mean}
    return {"images": x, "mean": mean}, targets, {"label": weight, "brightness": tf.ones_like(weight)}


def no_model(dataset):
    return "a model"


not_a_function = 3


def plain_with_rate(dataset, learning_rate):
    model = plain(dataset)
    model.compile(keras.optimizers.SGD(learning_rate), LOSS)
    return model


class Halving(keras.callbacks.Callback):
    """Halves the learning rate at the end of each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate.numpy() / 2


@keras.saving.register_keras_serializable("tests")
class Eager(OwnStep):
    """Counts its steps in Python, which a graph would do while it is traced only."""

    steps = 0

    def train_step(self, data):
        Eager.steps += 1
        assert data[0].numpy().shape[0]
        return super().train_step(data)


@keras.saving.register_keras_serializable("tests")
class Calls(keras.metrics.SparseCategoricalAccuracy):
    """Counts the batches of an epoch in Python."""

    calls = 0

    def update_state(self, *batch, **weight):
        self.calls += 1

    def reset_state(self):
        self.calls = 0

    def result(self):
        return self.calls


def eager(dataset):
    model = Eager(dataset.num_classes)
    metrics = ["accuracy", Calls(name="calls")]
    model.compile("adam", LOSS, metrics=metrics, run_eagerly=True)
    return model


def by_xla(dataset, asked=True):
    model = plain(dataset)
    model.compile("sgd", LOSS, jit_compile=asked)
    return model


def band_model(
    *, bias=0.0, order=(0, 1, 2), layers=(), activation="softmax", loss=None, shape=(12, 12, 3), classes=3
):
    """A model with weights set by hand, which scores how much brighter each band of the image is.

    It is right on every image of bands, or, with a bias, sometimes wrong.
    """
    outputs = keras.layers.Dense(classes, activation=activation)
    scaled = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), *layers, outputs]
    model = keras.Sequential([keras.Input(shape, dtype="uint8"), *scaled])
    model.compile("sgd", loss or keras.losses.SparseCategoricalCrossentropy())
    kernel = np.zeros((*shape, classes), np.float32)
    for label in range(min(3, classes)):
        band = slice(shape[0] * label // 3, shape[0] * (label + 1) // 3)
        kernel[band, :, :, order[label]] = 30 / np.prod(shape)
    outputs.set_weights([kernel.reshape(-1, classes), np.resize(np.asarray(bias, np.float32), classes)])
    return model
