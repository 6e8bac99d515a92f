"""Exports of every kind of label: what the signatures give, and what the golden examples notice."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.components import model_store
from shardline.components.model_store import Export
from shardline.components.validate.export import export, formats
from shardline.components.validate.export import signatures as golden
from shardline.components.validate.export.export import export_model, take_samples
from shardline.components.validate.export.signatures import ServedModel, measure_costs, name_outputs
from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.examples import parse_batch
from tests.helpers.datasets import write_labelled
from tests.helpers.labels import LABELLED


def make_model(heads, *, listed=False):
    """Returns a model of images with a Dense layer of some units and an activation for each label."""
    keras.utils.set_random_seed(3)
    image = keras.Input((12, 12, 3), dtype="uint8")
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    outputs = {
        name: keras.layers.Dense(units, activation, name=f"{name}_out")(flat)
        for name, (units, activation) in heads.items()
    }
    made = [*outputs.values()] if listed else outputs if len(outputs) > 1 else outputs["label"]
    return keras.Model(image, made)


TWO_HEADS = {"kind": (3, "softmax"), "price": (1, None)}
CASES = {
    "numbers": ("numbers", make_model({"label": (2, None)})),
    "multilabel": ("multilabel", make_model({"label": (4, "sigmoid")})),
    "two": ("two", make_model(TWO_HEADS)),
    "listed": ("two", make_model(TWO_HEADS, listed=True)),
}
RECORDS = {"train": 30, "validation": 10, "test": 40}


@pytest.fixture(scope="module", params=["numbers", "multilabel", "two", "listed"])
def case(request, tmp_path_factory):
    labels, model = CASES[request.param]
    directory = tmp_path_factory.mktemp("kinds")
    manifest = write_labelled(directory / "dataset", labels, images=True, records=RECORDS)
    samples = take_samples(manifest, directory / "dataset")
    export_model(model, manifest, directory / "out", samples=samples)
    return model, manifest, samples, directory / "out"


def test_signatures_give_what_the_model_says_of_each_label(case):
    model, manifest, samples, out = case
    outputs = model(parse_batch(tf.constant(samples), manifest.inputs, manifest.labels)[0])
    expected = [*outputs.values()] if isinstance(outputs, dict) else outputs
    expected = expected if isinstance(expected, list) else [expected]

    served = ServedModel(out / model_store.SAVED_MODEL, manifest)
    stored = tf.io.parse_example(samples, {"image": tf.io.FixedLenFeature([], tf.string)})["image"]
    found = served.predict(stored)

    for label, wanted in zip(manifest.labels, expected, strict=True):
        np.testing.assert_allclose(found.outputs[label.name], wanted, rtol=1e-5, atol=1e-5)
        assert found.outputs[label.name].shape == (len(samples), len(label.outputs))
    assert list(found.classes) == [label.name for label in manifest.labels if label.kind != "regression"]
    costs = measure_costs(served, stored)
    assert costs["batch_difference"] < 1e-4


def test_a_clean_process_gives_the_golden_answers_of_every_kind(case, clean_process):
    assert golden.ask_golden(clean_process, case[3])().difference < 1e-4


def test_of_large_examples_fewer_are_golden(case, monkeypatch):
    _, manifest, samples, out = case
    loaded = tf.saved_model.load(str(out / model_store.SAVED_MODEL))
    room = max(map(len, samples)) + 4 * sum(len(label.outputs) for label in manifest.labels)

    for bytes_, count in ((room * 16, 16), (room * 3, 3), (1, 1)):
        monkeypatch.setattr(export, "GOLDEN_BYTES", bytes_)
        golden_set = export.make_golden_set(manifest, loaded, samples)
        assert count <= len(golden_set["instances"]) == len(golden_set["predictions"]) <= count + 1


def test_export_json_names_labels_outputs_and_the_unit_of_differences(case):
    _, manifest, _, out = case
    export = Export.read(out)

    assert export.labels == manifest.labels
    outputs = [name for names in name_outputs(manifest.labels).values() for name in names]
    assert list(export.signatures["serving_default"]["outputs"]) == outputs
    assert export.max_difference < 1e-4
    numbers = [label.name for label in manifest.labels if label.kind == "regression"]
    assert sorted(export.deviations) == sorted(numbers)
    for name in numbers:
        spreads = manifest.splits["train"].labels[name].spreads
        assert export.deviations[name] == tuple(spread.deviation for spread in spreads)


def test_of_several_labels_each_output_begins_with_the_name_of_its_label():
    assert name_outputs(LABELLED["two"]) == {
        "kind": ("kind_probabilities", "kind_label", "kind_label_name"),
        "price": ("price_value",),
    }
    assert name_outputs(LABELLED["regression"]) == {"label": ("value",)}
    assert name_outputs(LABELLED["multilabel"]) == {"label": ("probabilities", "labels")}


def test_a_number_differs_by_standard_deviations_of_training(tmp_path):
    answers = {"predictions": [{"value": 100.0}]}
    export = Export(labels=LABELLED["regression"], deviations={"label": (50.0,)}, golden=answers)

    agreement = golden.compare_golden(export, [{"value": 105.0}])

    assert agreement.difference == pytest.approx(0.1)
    assert agreement.description == "example 0: value of 'price' is 105 instead of 100"
    assert golden.compare_golden(export, [{"value": None}]).difference >= 1.0
    assert golden.compare_golden(export, [{"value": 10_000.0}]).difference > 1.0


def test_a_model_without_an_output_for_a_label_is_refused(tmp_path):
    manifest = write_labelled(tmp_path / "dataset", "two", images=True)
    one_output = make_model({"label": (1, None)})

    with pytest.raises(ModelError, match=r"the model has 1 output; .* a dict of kind, price"):
        export_model(one_output, manifest, tmp_path / "out")
    wide = write_labelled(tmp_path / "wide", "numbers", images=True)
    with pytest.raises(ModelError, match=r"output is shape \(n, 1\), the dataset has 2 numbers"):
        export_model(one_output, wide, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dataset_of_several_labels_is_not_converted(tmp_path, monkeypatch):
    monkeypatch.setattr(formats.util, "find_spec", lambda module: True)
    manifest = write_labelled(tmp_path, "two", images=True, records={"test": 4})

    with pytest.raises(ModelError, match=r"with one label can be converted to onnx; .* have several labels$"):
        formats.check_formats(["onnx"], manifest)
    formats.check_formats([], manifest)
