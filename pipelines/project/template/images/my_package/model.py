"""The model: any function that returns a compiled Keras 3 model."""

from __future__ import annotations

import keras
from shardline import DatasetInfo, make_output


def build_model(dataset: DatasetInfo, learning_rate: float = 3e-3, filters: int = 16) -> keras.Model:
    """Returns a convolutional network, deeper for larger images, with normalization over the global batch.

    Args:
        dataset: What is known about the data: input_shape, label, features, records.
        learning_rate: Learning rate of Adam.
        filters: Filters of the first convolution; a run's parameter hparams sets such arguments.
    """
    images = keras.Input(dataset.input_shape, dtype="uint8")
    features = keras.layers.Rescaling(1 / 255)(images)
    side = min(dataset.input_shape[:2])
    while side >= 12:
        features = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(features)
        features = keras.layers.BatchNormalization(momentum=0.9, synchronized=True)(features)
        features = keras.layers.MaxPooling2D()(keras.layers.Activation("relu")(features))
        side, filters = side // 2, 2 * filters
    features = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(features)
    features = keras.layers.GlobalMaxPooling2D()(features)
    output, loss, metric = make_output(dataset, features)
    model = keras.Model(images, output)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate), loss=loss, metrics=[metric])
    return model
