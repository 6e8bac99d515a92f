"""Model functions of several labels, and with layers that are adapted."""

import keras


def normalized(dataset):
    """Incomes normalized by a layer that is adapted, and an output for each of two labels."""
    income = keras.Input((), name="income")
    layer = keras.layers.Normalization(name="normalization")
    layer.adapt(dataset.training_examples(["income"])["income"][:, None])
    hidden = keras.layers.Dense(4, activation="tanh")(layer(keras.ops.expand_dims(income, -1)))
    outputs = {"kind": keras.layers.Dense(3, "softmax")(hidden), "price": keras.layers.Dense(1)(hidden)}
    model = keras.Model([income], outputs)
    model.compile("adam", {"kind": "sparse_categorical_crossentropy", "price": "mse"})
    return model


def list_of_outputs(dataset):
    """A list of outputs, of layers with the labels' names, or the only output; numbers in their own unit."""
    columns = [keras.Input((), name=name, dtype=one.dtype) for name, one in dataset.inputs.items()]
    numbers = [one for one in columns if one.dtype != "string"]
    scale = keras.layers.Normalization(mean=[2005.0, 5e6], variance=[25.0, 1e5], dtype="float32")
    hidden = scale(keras.ops.stack([keras.ops.cast(one, "float32") for one in numbers], axis=-1))
    hidden = keras.layers.Dense(8, activation="tanh")(hidden)
    outputs, losses = [], []
    for name, label in dataset.labels.items():
        kind = "softmax" if label.kind == "class" else None
        outputs.append(keras.layers.Dense(len(label.outputs), kind, name=name)(hidden))
        losses.append("sparse_categorical_crossentropy" if kind else "mae")
    single = len(outputs) == 1
    model = keras.Model(columns, outputs[0] if single else outputs)
    model.compile(
        "adam", losses[0] if single else losses, metrics=None if single else [["accuracy"], ["mse"]]
    )
    return model
