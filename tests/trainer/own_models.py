"""Losses, layers, optimizers and models of one's own, as users write them."""

import keras
import tensorflow as tf

layers, losses = keras.layers, keras.losses


def of_numbers(y_true, y_pred):
    return keras.ops.sparse_categorical_crossentropy(keras.ops.cast(y_true, "int32"), y_pred)


def of_one_hot(y_true, y_pred):
    return keras.ops.sum(keras.ops.square(y_true - y_pred), axis=-1)


def share_right(y_true, y_pred):
    return keras.ops.cast(keras.ops.equal(y_true, keras.ops.argmax(y_pred, axis=-1)), "float32")


class OwnLoss(losses.Loss):
    def call(self, y_true, y_pred):
        return of_one_hot(y_true, y_pred)


@keras.saving.register_keras_serializable("tests")
class Entropy(layers.Layer):
    """Wants probabilities to be sure; needs no labels."""

    def call(self, inputs):
        self.add_loss(-keras.ops.mean(keras.ops.sum(inputs * keras.ops.log(inputs), axis=-1)))
        return inputs


@keras.saving.register_keras_serializable("tests")
class OwnSGD(keras.optimizers.Optimizer):
    def __init__(self, learning_rate=0.1, **options):
        super().__init__(learning_rate=learning_rate, **options)

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * gradient)


def _compile(model, optimizer="adam", loss="sparse_categorical_crossentropy"):
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def _pixels(dataset):
    images = keras.Input(dataset.input_shape, dtype="uint8")
    return images, layers.Flatten()(layers.Rescaling(1 / 255)(images))


def _ended(dataset, images, hidden):
    return _compile(keras.Model(images, layers.Dense(dataset.num_classes, "softmax")(hidden)))


def entropy(dataset):
    images, flat = _pixels(dataset)
    model = keras.Model(images, Entropy()(layers.Dense(dataset.num_classes, "softmax")(flat)))
    model.compile("adam")
    return model


def without_input(dataset):
    head = layers.Dense(dataset.num_classes, "softmax")
    return _compile(keras.Sequential([layers.Rescaling(1 / 255), layers.Flatten(), head]))


def functional(dataset):
    images, flat = _pixels(dataset)
    shared = layers.Dense(6, "relu")
    left, right = shared(flat), shared(layers.Activation("tanh")(flat))
    joined = layers.Concatenate()([left, layers.Multiply()([left, right])])
    return _ended(dataset, images, joined)


def operations(dataset):
    images = keras.Input(dataset.input_shape, dtype="uint8")
    flat = keras.ops.reshape(keras.ops.cast(images, "float32") / 255, (-1, 16))
    return _ended(dataset, images, keras.ops.sin(flat))


def nested(dataset):
    images, flat = _pixels(dataset)
    inner = keras.Sequential([keras.Input((16,)), layers.Dense(6, "relu")], name="inner")
    inner.trainable = False
    return _ended(dataset, images, inner(flat))


def low_rank(dataset):
    images, flat = _pixels(dataset)
    dense = layers.Dense(8)
    model = keras.Model(images, layers.Dense(dataset.num_classes, "softmax")(dense(flat)))
    dense.enable_lora(2)
    return _compile(model)


@keras.saving.register_keras_serializable("tests")
class Own(keras.Model):
    """A subclass that is built when it is first called."""

    def __init__(self, classes, **options):
        super().__init__(**options)
        self.classes = classes
        self.hidden = layers.Dense(6, "relu")
        self.head = layers.Dense(classes, "softmax")

    def build(self, input_shape):
        self.hidden.build((None, 16))
        self.head.build((None, 6))

    def call(self, inputs):
        flat = keras.ops.reshape(keras.ops.cast(inputs, "float32") / 255, (-1, 16))
        return self.head(self.hidden(flat))

    def get_config(self):
        return {**super().get_config(), "classes": self.classes}


def subclassed(dataset):
    return _compile(Own(dataset.num_classes))


@keras.saving.register_keras_serializable("tests")
class Silent(Own):
    """Its step returns a number of its own, and no loss."""

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=labels, y_pred=self(images, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"steepness": tf.linalg.global_norm(gradients)}


def silent(dataset):
    model = Silent(dataset.num_classes)
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


@keras.saving.register_keras_serializable("tests")
class OwnComputeLoss(Own):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 3.0 * super().compute_loss(x, y, y_pred, sample_weight, training)


def own_compute_loss(dataset):
    return _compile(OwnComputeLoss(dataset.num_classes))


@keras.saving.register_keras_serializable("tests")
class TwoOptimizers(Own):
    """Its parts have an optimizer each."""

    def compile(self, optimizer, second, **options):
        super().compile(optimizer, **options)
        self.second = second

    def build(self, input_shape):
        super().build(input_shape)
        if hasattr(self, "second"):
            self.second.build(self.head.trainable_variables)

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            predicted = self(images, training=True)
            loss = self.compute_loss(y=labels, y_pred=predicted)
        parts = [self.hidden.trainable_variables, self.head.trainable_variables]
        first, second = tape.gradient(loss, parts)
        self.optimizer.apply(first, parts[0])
        self.second.apply(second, parts[1])
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(labels)[0])
        return self.compute_metrics(images, labels, predicted)

    def get_compile_config(self):
        return None


def two_optimizers(dataset):
    model = TwoOptimizers(dataset.num_classes)
    first, second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
    model.compile(first, second, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def multi_optimizer(dataset):
    """One optimizer for the last layer, another for all others."""
    rest, last = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
    names = keras.optimizers.OptimizerMap(rest, {"head/.*": last})
    images, flat = _pixels(dataset)
    head = layers.Dense(dataset.num_classes, "softmax", name="head")
    model = keras.Model(images, head(layers.Dense(6, "relu")(flat)))
    return _compile(model, keras.optimizers.MultiOptimizer(names))
