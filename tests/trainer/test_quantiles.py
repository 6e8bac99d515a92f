"""Quantile regression: the loss, the head, and a model of diabetes from the table to its validation."""

import csv
import json

import keras
import numpy as np
import pytest
from sklearn import datasets
from sklearn.metrics import mean_pinball_loss

import shardline
from shardline.components import model_store
from shardline.components.model_store import Export
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.validate.export import predictions as golden
from shardline.components.validate.gate.gate import Gate
from shardline.components.validate.validation import validate
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.examples import describe
from shardline.trainer.loop.build import build
from shardline.trainer.models.head import read_heads
from shardline.trainer.models.zoo import QuantileLoss, parse_quantiles
from shardline.trainer.train import train
from tests.helpers.datasets import write_labelled

SHARES = [0.1, 0.5, 0.9]


def test_the_loss_is_that_of_scikit_learn():
    random = np.random.default_rng(0)
    true, outputs = random.normal(size=50).astype("float32"), random.normal(size=(50, 3)).astype("float32")
    expected = np.mean(
        [mean_pinball_loss(true, outputs[:, i], alpha=share) for i, share in enumerate(SHARES)]
    )

    for shape in ((50,), (50, 1)):
        assert float(shardline.QuantileLoss()(true.reshape(shape), outputs)) == pytest.approx(
            expected, abs=1e-6
        )


def test_the_loss_is_saved_with_its_quantiles():
    loss = QuantileLoss((0.25, 0.75))

    again = keras.losses.deserialize(keras.losses.serialize(loss))

    assert isinstance(again, QuantileLoss)
    assert again.quantiles == (0.25, 0.75)


@pytest.mark.parametrize("quantiles", [[], [0.5, 0.5], [0.9, 0.1], [0.0, 0.5], [0.5, 1.0], ["a"], 0.5, "0.5"])
def test_quantiles_that_cannot_be_are_refused(quantiles):
    with pytest.raises(ModelError, match=r"quantiles must be numbers between 0 and 1, each larger"):
        QuantileLoss(quantiles)


def test_the_loss_takes_one_number_and_an_output_for_each_quantile():
    with pytest.raises(ModelError, match=r"takes labels \(n,\) and outputs \(n, 3\), got \(n, 2\)"):
        QuantileLoss()(np.zeros((4, 2)), np.zeros((4, 3)))
    with pytest.raises(ModelError, match=r"got \(n,\) and \(n, 2\)"):
        QuantileLoss()(np.zeros(4), np.zeros((4, 2)))


@pytest.mark.parametrize("head", ["numbers", "quantiles", "quantiles x", "quantiles 0.9 0.1", None, 3])
def test_other_heads_are_not_of_quantiles(head):
    assert parse_quantiles(head) == ()
    assert parse_quantiles("quantiles 0.1 0.5") == (0.1, 0.5)


def image_model(units):
    image = keras.Input((12, 12, 3), dtype="uint8")
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    model = keras.Model(image, keras.layers.Dense(units)(flat))
    model.compile("adam", QuantileLoss())
    return model


@pytest.mark.parametrize(
    ("labels", "units", "message"),
    [
        ("regression", 2, r"is shape \(n, 2\), its QuantileLoss has 3 quantiles and needs \(n, 3\)"),
        ("numbers", 2, r"QuantileLoss is for one number, and the label 'label' is regression:"),
        ("multilabel", 4, r"QuantileLoss is for one number, and the label 'label' is multilabel:"),
    ],
)
def test_a_model_that_does_not_fit_its_quantiles_is_refused(tmp_path, labels, units, message):
    info = write_labelled(tmp_path, labels, images=True).info()

    with pytest.raises(ModelError, match=message):
        read_heads(image_model(units), info)


def test_a_quantile_is_an_output_of_a_model_of_ones_own(tmp_path):
    info = write_labelled(tmp_path, "regression", images=True).info()

    assert read_heads(image_model(3), info) == {"label": "quantiles 0.1 0.5 0.9"}


@pytest.mark.parametrize("labels", ["numbers", "multilabel", "two"])
def test_mlp_has_quantiles_of_one_number_alone(tmp_path, labels):
    info = describe(tmp_path, write_labelled(tmp_path, labels))

    with pytest.raises(ModelError, match=r"mlp: quantiles need one label of one number, and the dataset has"):
        build("mlp", info, {"quantiles": SHARES})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("diabetes")
    found = datasets.load_diabetes()
    with (root / "diabetes.csv").open("w", newline="") as file:
        rows = np.column_stack([found.data, found.target]).tolist()
        csv.writer(file).writerows([[*found.feature_names, "target"], *rows])
    shardline.preprocess(
        PreprocessSettings(source=f"table:{root / 'diabetes.csv'}", label="regression:target"),
        root / "data",
    )

    def model_of(**hparams):
        out = root / f"model{len(hparams)}"
        train(
            TrainSettings(
                dataset=str(root / "data"), model="mlp", model_dir=str(out), epochs=2, hparams=hparams
            ),
            {},
            Preemption(1),
        )
        return out / "model.keras"

    return root, model_of(quantiles=SHARES, learning_rate=0.01), model_of()


def test_quantiles_of_diabetes_are_trained_exported_and_judged(trained):
    root, model, _ = trained
    assert json.loads(model.with_name("settings.json").read_text())["head"] == "quantiles 0.1 0.5 0.9"
    gate = Gate().with_rules(["coverage_error <= 0.9", "coverage >= 0"])

    found = validate(model, root / "data", root / "out", gate=gate)

    export = Export.read(root / "out")
    assert export.quantiles == {"label": (0.1, 0.5, 0.9)}
    outputs = export.signatures["serving_default"]["outputs"]
    assert {name: one["shape"] for name, one in outputs.items()} == {"value": [None], "quantiles": [None, 3]}
    assert {"pinball_loss", "coverage", "coverage_error", "quantile_crossings", "rmse"} <= {
        *found.evaluation.metrics
    }
    assert {"pinball_loss", "coverage", "coverage_error"} <= {*found.evaluation.intervals}
    assert found.evaluation.metrics["max_difference"] < 1e-4
    assert found.evaluation.metrics["golden_difference"] < 1e-4
    answer = export.golden["predictions"][0]
    assert answer["value"] == answer["quantiles"][1]
    changed = [
        {**row, "quantiles": [*row["quantiles"][:2], row["quantiles"][2] + 77.0]}
        for row in export.golden["predictions"]
    ]
    assert golden.compare(export, changed).description.startswith("example ")
    assert golden.compare(export, changed).difference == pytest.approx(1, abs=0.05)
    report = (root / "out" / model_store.REPORT_FILE).read_text()
    assert "Calibration of quantiles" in report
    assert "coverage of the interval of quantiles" in report
    assert manifests.load(root / "data").labels[0].outputs == ("target",)


def test_a_model_without_quantiles_has_none_to_judge(trained):
    root, _, plain = trained

    with pytest.raises(SettingsError, match=r"the model predicts no quantiles; it has rmse, mae"):
        validate(plain, root / "data", root / "none", gate=Gate().with_rules(["coverage_error <= 0.05"]))
    assert not (root / "none").exists()
    validate(plain, root / "data", root / "none", gate=Gate())
    assert "Calibration of quantiles" not in (root / "none" / model_store.REPORT_FILE).read_text()
