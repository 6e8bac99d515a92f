"""Built-in models, and what is refused before a run begins."""

import inspect

import keras
import numpy as np
import pytest

from shardline.trainer.base.errors import ModelError
from shardline.trainer.base.plugins import import_string
from shardline.trainer.loop.build import build, create_variables, model_function
from shardline.trainer.models.zoo import SmoothedCrossentropy, find_application
from tests.helpers.datasets import example_batch, write_dataset


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("dataset"), records={"train": 6}, shape=(32, 32, 1)).info()


# Ways of preprocessing: caffe, tf, and inside the application itself.
FAMILIES = ["ResNet50", "MobileNetV2", "MobileNetV3Small"]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_application_has_its_own_preprocessing_in_the_saved_model(info, tmp_path, name):
    model = build(f"keras:{name}", info, {})
    create_variables(model, train_step=example_batch(info))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=True)

    application = find_application(name)
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 1), np.uint8)
    coloured = np.repeat(images, 3, axis=-1).astype("float32")
    base = next(layer for layer in loaded.layers if isinstance(layer, keras.Model))
    features = base(inspect.getmodule(application).preprocess_input(coloured))
    np.testing.assert_allclose(loaded(images), loaded.layers[-1](features), atol=1e-6)
    assert loaded.optimizer.learning_rate.numpy() == np.float32(1e-4)


def test_every_application_is_there():
    assert find_application("NASNetLarge") is keras.applications.NASNetLarge
    with pytest.raises(ModelError, match=r"unknown model 'keras:resnet5'; keras.applications has ResNet50, "):
        model_function("keras:resnet5")


def test_images_that_are_too_small_are_refused(info):
    with pytest.raises(ModelError, match=r"keras:InceptionV3 does not take images of \(32, 32\) pixels:.*75"):
        build("keras:InceptionV3", info, {})


def test_weights_from_a_path_are_loaded_and_frozen(info, tmp_path):
    path = tmp_path / "base.weights.h5"
    trained = keras.applications.MobileNetV2(weights=None, include_top=False)
    trained.save_weights(path)
    model = build("keras:MobileNetV2", info, {"weights": str(path), "learning_rate": 0.5})

    base = next(layer for layer in model.layers if isinstance(layer, keras.Model))
    for ours, theirs in zip(base.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(model.trainable_variables) == 2
    assert model.optimizer.learning_rate.numpy() == np.float32(0.5)
    with pytest.raises(ModelError, match=r"keras:MobileNet: cannot load weights.*MobileNet without its top"):
        build("keras:MobileNet", info, {"weights": str(path)})
    with pytest.raises(ModelError, match=r"no weights file 'none.h5'; set imagenet, a path, or none"):
        build("keras:MobileNet", info, {"weights": "none.h5"})


def test_weights_that_need_a_network_say_so(info, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("URL fetch failure")

    monkeypatch.setattr("keras.src.applications.densenet.file_utils.get_file", unreachable)
    with pytest.raises(
        ModelError, match="URL fetch failure; imagenet needs network access, else set the path"
    ):
        build("keras:DenseNet121", info, {"weights": "imagenet"})


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5])
def test_a_share_of_smoothing_is_below_one(info, share):
    with pytest.raises(ModelError, match=f"label_smoothing must be at least 0 and below 1, not {share}"):
        build("mnist_cnn", info, {"label_smoothing": share})


def test_labels_are_smoothed(info, tmp_path):
    smoothed = build("mnist_cnn", info, {"label_smoothing": 0.2})
    create_variables(smoothed, train_step=example_batch(info))
    smoothed.save(tmp_path / "model.keras")

    assert keras.models.load_model(tmp_path / "model.keras").loss.label_smoothing == 0.2


def test_smoothed_crossentropy_is_that_of_keras_on_one_hot_labels():
    labels = np.array([0, 2, 1])
    outputs = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.5, 0.25, 0.25]], "float32")
    reference = keras.losses.CategoricalCrossentropy(label_smoothing=0.3)(np.eye(3)[labels], outputs)

    assert float(SmoothedCrossentropy(0.3)(labels, outputs)) == pytest.approx(float(reference), rel=1e-6)


def test_the_head_stays_in_float32_under_mixed_precision(info):
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        model = build("keras:MobileNetV2", info, {})
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    assert model(np.zeros((1, 32, 32, 1), np.uint8)).dtype.name == "float32"
    base = next(layer for layer in model.layers if isinstance(layer, keras.Model))
    assert base.layers[1].compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "unknown_optimizer",
            r"'tests.helpers.models:unknown_optimizer' failed: .*Admm.* \(models.py, line \d+\)",
        ),
        ("leaving", r"'tests.helpers.models:leaving' failed: SystemExit: 0 \(models.py, line \d+\)"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_clear_line(info, name, message):
    with pytest.raises(ModelError, match=message) as error:
        build(f"tests.helpers.models:{name}", info, {})
    assert "\n" not in str(error.value)


def test_a_loss_that_does_not_exist_is_one_clear_line(info):
    model = build("tests.helpers.models:unknown_loss", info, {})

    with pytest.raises(
        ModelError,
        match=r"cannot be built on batches of \(uint8 \(2, 32, 32, 1\), int64 \(2,\)\):.*crossentropie",
    ):
        create_variables(model, train_step=example_batch(info))


def test_names_become_import_strings_without_loading_anything():
    assert import_string("keras:ResNet50") == "shardline.trainer.models.zoo:build_application"
    assert import_string("mlp") == "shardline.trainer.models.zoo:build_mlp"
    with pytest.raises(ModelError, match=r"unknown model 'mlpp'; built in are .*mlp, text and keras:NAME"):
        import_string("mlpp")
