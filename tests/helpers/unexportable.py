"""Model functions whose models train well; some of them could not be saved, loaded or served afterwards."""

import keras
import tensorflow as tf


class Unregistered(keras.layers.Layer):
    """A layer that no file can name."""

    def call(self, inputs):
        return 2.0 * inputs


@keras.saving.register_keras_serializable("unexportable")
class Scaled(keras.layers.Layer):
    """A layer of one's own as it should be."""

    def __init__(self, factor=2.0, **options):
        super().__init__(**options)
        self.factor = factor

    def call(self, inputs):
        return self.factor * inputs

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


@keras.saving.register_keras_serializable("unexportable")
class Unconfigured(keras.layers.Layer):
    """Its constructor needs what its configuration does not have."""

    def __init__(self, table, **options):
        super().__init__(**options)
        self.table = table

    def call(self, inputs):
        return inputs * self.table.factor


@keras.saving.register_keras_serializable("unexportable")
class Forgetful(keras.layers.Layer):
    """Its weight is a variable that Keras does not know of."""

    def build(self, input_shape):
        self.hidden = [tf.Variable(tf.random.normal((input_shape[-1],)), trainable=False)]

    def call(self, inputs):
        return inputs * self.hidden[0]


@keras.saving.register_keras_serializable("unexportable")
class Called(keras.layers.Layer):
    """It calls Python in every step."""

    def call(self, inputs):
        called = tf.numpy_function(lambda values: values, [inputs], tf.float32)
        called.set_shape(inputs.shape)
        return called


@keras.saving.register_keras_serializable("unexportable")
class Eager(keras.Model):
    """It computes in NumPy."""

    def __init__(self, classes, **options):
        super().__init__(**options)
        self.classes = classes
        self.dense = keras.layers.Dense(classes, "softmax")

    def call(self, inputs):
        return self.dense(inputs.numpy().reshape(len(inputs), -1) / 255)

    def build(self, input_shape):
        self.dense.build((None, input_shape[1] * input_shape[2] * input_shape[3]))

    def get_config(self):
        return {**super().get_config(), "classes": self.classes}


@keras.saving.register_keras_serializable("unexportable")
class Unsaveable(keras.Model):
    """A subclass that is built when it is first called, and whose weights cannot be saved."""

    def __init__(self, classes, **options):
        super().__init__(**options)
        self.classes = classes
        self.flatten, self.dense = keras.layers.Flatten(), keras.layers.Dense(classes, "softmax")

    def call(self, inputs):
        return self.dense(self.flatten(inputs))

    def get_config(self):
        return {**super().get_config(), "classes": self.classes}

    def save_own_variables(self, store):
        raise NotImplementedError("weights stay here")


def _compiled(layer, dataset, *, loss="sparse_categorical_crossentropy", metrics=("accuracy",)):
    first = [keras.Input(dataset.input_shape, dtype="uint8"), keras.layers.Rescaling(1 / 255)]
    head = keras.layers.Dense(dataset.num_classes, "softmax")
    model = keras.Sequential([*first, keras.layers.Flatten(), *layer, head])
    model.compile("adam", loss, metrics=list(metrics))
    return model


def lambda_layer(dataset):
    return _compiled([keras.layers.Lambda(lambda x: 2 * x)], dataset)


def own_function(dataset):
    return _compiled([keras.layers.Dense(3, activation=lambda x: 2 * x)], dataset)


def unregistered(dataset):
    return _compiled([Unregistered()], dataset)


def unconfigured(dataset):
    class Table:
        factor = 2.0

    return _compiled([Unconfigured(Table())], dataset)


def forgetful(dataset):
    return _compiled([Forgetful()], dataset)


def called(dataset):
    return _compiled([Called()], dataset)


def eager(dataset):
    model = Eager(dataset.num_classes)
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def floats(x, y):
    """A transformation to what an exported model does not get."""
    return tf.cast(x, tf.float32) / 255, y


def unsaveable(dataset):
    model = Unsaveable(dataset.num_classes)
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def scaled(dataset):
    """With statistics that each replica keeps for itself, and a layer that has to be tried."""
    return _compiled([keras.layers.BatchNormalization(), Scaled(3.0)], dataset)


def two_inputs(dataset):
    images, other = keras.Input(dataset.input_shape, dtype="uint8"), keras.Input((1,))
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(images), other])
    model = keras.Model([images, other], keras.layers.Dense(dataset.num_classes, "softmax")(joined))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def own_loss(y_true, y_pred):
    """A plain function that no file can name, of one-hot labels."""
    return keras.losses.categorical_crossentropy(y_true, y_pred)


class OwnMetric(keras.metrics.CategoricalAccuracy):
    """A metric that no file can name."""


def own_loss_and_metric(dataset):
    return _compiled([], dataset, loss=own_loss, metrics=[OwnMetric(), keras.metrics.F1Score()])


def single(dataset, from_logits=False):
    """One sigmoid unit, or one logit, for two classes."""
    first = [keras.Input(dataset.input_shape, dtype="uint8"), keras.layers.Rescaling(1 / 255)]
    head = keras.layers.Dense(1, None if from_logits else "sigmoid")
    model = keras.Sequential([*first, keras.layers.Flatten(), head])
    loss = keras.losses.BinaryCrossentropy(from_logits=from_logits)
    metrics = [keras.metrics.BinaryAccuracy(threshold=0.0 if from_logits else 0.5, name="accuracy")]
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=metrics)
    return model
