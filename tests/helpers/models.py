"""Model functions that tests train, some of them wrong on purpose."""

import keras


def _compiled(layers, dataset, learning_rate=1e-2, classes=None):
    model = keras.Sequential(
        [
            keras.Input(dataset.input_shape, dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            *layers,
            keras.layers.Flatten(),
            keras.layers.Dense(classes or dataset.num_classes, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def synchronized(dataset, learning_rate=1e-2):
    """BatchNormalization over the global batch.

    Without a bias before it: its gradient is rounding noise, which Adam would blow up to whole steps.
    """
    layers = [keras.layers.Conv2D(4, 3, use_bias=False), keras.layers.BatchNormalization(synchronized=True)]
    return _compiled(layers, dataset, learning_rate)


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
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def dropout(dataset, rate=0.5):
    return _compiled([keras.layers.Dropout(rate)], dataset)


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
    layers = [
        keras.layers.Rescaling(1 / 255),
        keras.layers.Flatten(),
        keras.layers.Dense(dataset.num_classes),
    ]
    model = keras.Sequential([keras.Input(dataset.input_shape, dtype="uint8"), *layers])
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def no_model(dataset):
    return "a model"


not_a_function = 3
