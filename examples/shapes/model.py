"""A user's own model: any function that returns a compiled Keras 3 model.

Train it on the shapes beside it, from the root of the repository:

    make run source=examples.shapes.source:Shapes model=examples.shapes.model:build_model
"""

import keras


def build_model(dataset, learning_rate=3e-3, filters=16):
    """A small convolutional network with batch normalization over the global batch.

    Args:
        dataset: What is known about the data: input_shape, num_classes, class_names, features, records.
        learning_rate: Of Adam.
        filters: Of the first convolution.
    """
    model = keras.Sequential(
        [
            keras.Input(dataset.input_shape, dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(filters, 3, use_bias=False),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Activation("relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(2 * filters, 3, activation="relu"),
            keras.layers.GlobalMaxPooling2D(),
            keras.layers.Dense(dataset.num_classes, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model
