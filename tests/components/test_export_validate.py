"""Export, evaluation and verdict, with real small models."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
from collections import Counter
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from kfp import dsl
from PIL import Image, ImageOps
from sklearn import metrics

from shardline.components import model_store
from shardline.components.model_store import Export
from shardline.components.validate import validation
from shardline.components.validate.component import export_validate
from shardline.components.validate.evaluate import MAX_MISTAKES, Examples, measure_export
from shardline.components.validate.export import signatures as golden
from shardline.components.validate.export.export import export_model
from shardline.components.validate.export.signatures import ServedModel
from shardline.components.validate.rules import Gate
from shardline.trainer import manifest as manifests
from shardline.trainer.base import progress
from shardline.trainer.base.errors import DatasetError, ModelError, SettingsError
from shardline.trainer.data.examples import decode_image
from tests.helpers import models
from tests.helpers.datasets import (
    CLASS_NAMES,
    band_image,
    encode_png,
    make_example,
    read_examples,
    write_dataset,
    write_shard,
)
from tests.helpers.heads import read_head
from tests.helpers.labels import class_label, counted
from tests.helpers.models import band_model

SHAPE = (12, 12, 3)
TEST_RECORDS = 90


def sometimes_wrong():
    """Returns a model that takes about half of the middle and bottom images for top ones."""
    return band_model(bias=(4.7, 0.0, 0.0))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory, shape=SHAPE, shards=4, records={"train": 12, "test": TEST_RECORDS})
    return directory


@pytest.fixture(scope="module")
def manifest(dataset):
    return manifests.load(dataset)


@pytest.fixture(scope="module")
def examples(dataset):
    keys, images, labels = zip(*read_examples(dataset, "test"), strict=True)
    return keys, list(images), np.array(labels)


@pytest.fixture(scope="module")
def exported(manifest, tmp_path_factory):
    """An exported model that makes mistakes, and the model itself, whose optimizer has variables."""
    model, out = sometimes_wrong(), tmp_path_factory.mktemp("exported")
    model.optimizer.build(model.trainable_variables)
    export(model, manifest, out)
    return model, out


#: What is loaded of an export, by its path: no test loads it again.
LOADED = {}


def export(model, manifest, out):
    _, LOADED[out / model_store.SAVED_MODEL] = export_model(model, manifest, out)


def evaluate(saved_model, dataset, **options):
    arguments = {"loaded": LOADED.get(saved_model), "calls": 3} | options
    return measure_export(saved_model, Examples(dataset, manifests.load(dataset)), **arguments).evaluation


@pytest.fixture(scope="module")
def evaluated(exported, dataset):
    """The evaluation of the model that makes mistakes."""
    return evaluate(exported[1] / model_store.SAVED_MODEL, dataset, batch_size=7)  # which does not divide 90


def validate(model_file, dataset, out, *, gate):
    return validation.validate(model_file, dataset, out, gate=gate).blessing


def save(model, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    model.save(directory / "model.keras")
    return directory / "model.keras"


def decoded(images, manifest):
    return np.stack([decode_image(tf.constant(image), manifest.image) for image in images])


def serve(out: Path, images):
    export = Export.read(out)
    manifest = SimpleNamespace(labels=export.labels, inputs=export.inputs, splits={"test": None})
    path = out / model_store.SAVED_MODEL
    served = ServedModel(path, manifest, LOADED.get(path)).predict(tf.constant(images))
    return SimpleNamespace(probabilities=served.outputs["label"], labels=served.classes["label"])


# Export


def test_the_signature_takes_other_sizes_and_formats(exported, manifest):
    model, out = exported
    rng = np.random.default_rng(5)
    images = []
    for image_format in ("PNG", "JPEG"):
        buffer = io.BytesIO()
        Image.fromarray(band_image(1, (40, 25, 3), rng)).save(buffer, image_format)
        images.append(buffer.getvalue())
    images.append(encode_png(band_image(1, (30, 30, 1), rng)))  # grey becomes RGB

    served = serve(out, images)

    expected = model.predict(decoded(images, manifest), verbose=0)
    np.testing.assert_allclose(served.probabilities, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("orientation", [3, 6, 7])
def test_the_signature_turns_photos_upright(orientation, exported):
    photo = Image.fromarray(band_image(1, (36, 24, 3), np.random.default_rng(5)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo.save(sideways := io.BytesIO(), "JPEG", exif=exif, quality=95)
    ImageOps.exif_transpose(Image.open(sideways)).save(upright := io.BytesIO(), "PNG")

    served = serve(exported[1], [sideways.getvalue(), upright.getvalue()])

    np.testing.assert_allclose(served.probabilities[0], served.probabilities[1], atol=0.05)


def half_model():
    model, output = band_model(), keras.layers.Dense(3, "softmax", dtype="float16")
    half = keras.Sequential([keras.Input(SHAPE, dtype="uint8"), *model.layers[:-1], output])
    half.compile("sgd", "sparse_categorical_crossentropy")
    output.set_weights(model.layers[-1].get_weights())
    return half


LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    ("make", "answer"),
    [
        (lambda _: half_model(), lambda outputs: outputs.astype(np.float32)),
        (lambda _: band_model(activation=None, loss=LOGITS), lambda outputs: tf.nn.softmax(outputs).numpy()),
        (lambda manifest: models.own_step(manifest.info()), lambda outputs: outputs),
    ],
    ids=["in single precision", "with a softmax", "subclassed"],
)
def test_what_a_model_says_is_served(make, answer, manifest, tmp_path, examples):
    model, (_, images, _) = make(manifest), examples
    expected = answer(np.asarray(model(decoded(images, manifest), training=False)))

    export(model, manifest, tmp_path)

    served = serve(tmp_path, images)
    tolerance = 1e-3 if model.layers[-1].compute_dtype == "float16" else 1e-6
    np.testing.assert_allclose(served.probabilities, expected, rtol=0, atol=tolerance)
    assert served.probabilities.dtype == np.float32
    softmax_added = json.loads((tmp_path / model_store.EXPORT_FILE).read_text())["softmax_added"]
    assert softmax_added == (model.loss is LOGITS)


def test_every_weight_is_stored_once_and_the_optimizer_not_at_all(exported):
    model, out = exported
    stored = tf.train.list_variables(str(out / model_store.SAVED_MODEL / "variables" / "variables"))
    assert sum(int(np.prod(shape)) for _, shape in stored if shape) == model.count_params()


@pytest.mark.parametrize(
    ("activation", "loss", "head"),
    [
        ("softmax", "sparse_categorical_crossentropy", "probabilities"),
        ("softmax", {"dense": keras.losses.SparseCategoricalCrossentropy()}, "probabilities"),
        (None, [keras.losses.SparseCategoricalCrossentropy(from_logits=True)], "logits"),
        # Keras trains this one on the logits behind the softmax: a second softmax would be wrong.
        ("softmax", keras.losses.SparseCategoricalCrossentropy(from_logits=True), "probabilities"),
    ],
)
def test_head(activation, loss, head, manifest):
    model = band_model(activation=activation)
    model.loss = loss

    assert read_head(model, manifest.info()) == head


def two_outputs():
    image = keras.Input(SHAPE)
    output = keras.layers.Dense(3, "softmax")(keras.layers.Flatten()(image))
    return keras.Model(image, [output, output])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: band_model(shape=(8, 8, 1)),
            r"takes images of shape \(8, 8, 1\), the dataset has \(12, 12, 3\)",
        ),
        (lambda: band_model(classes=5), r"output is shape \(n, 5\), the dataset has 3 classes"),
        (lambda: band_model(activation=None), r"not probabilities \(on a black image: \[0, 0, 0\]\)"),
        (lambda: band_model(activation="sigmoid"), "does not say from_logits"),
        (two_outputs, "the model has 2 outputs; an exported model has one"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_and_nothing_written(make, message, manifest, tmp_path):
    with pytest.raises(ModelError, match=message):
        export_model(make(), manifest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Evaluation


def test_every_example_is_evaluated_once_and_the_figures_are_right(exported, evaluated, manifest, examples):
    _, images, labels = examples
    probabilities = exported[0].predict(decoded(images, manifest), verbose=0)
    predicted, found = probabilities.argmax(axis=1), evaluated

    right = int((predicted == labels).sum())
    assert 0 < right < TEST_RECORDS
    assert found.examples == TEST_RECORDS
    assert found.metrics["accuracy"] == right / TEST_RECORDS
    own_loss = -np.log(probabilities[np.arange(TEST_RECORDS), labels]).mean()
    assert found.metrics["log_loss"] == pytest.approx(own_loss, abs=1e-6)
    assert found.non_finite == 0
    pairs = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
    assert found.confusion == tuple((*pair, count) for pair, count in sorted(pairs.items()))
    report = metrics.classification_report(
        labels, predicted, target_names=CLASS_NAMES, output_dict=True, zero_division=0.0
    )
    for score in found.classes:
        expected = report[score.name]
        assert (score.precision, score.recall, score.f1) == pytest.approx(
            (expected["precision"], expected["recall"], expected["f1-score"]), abs=1e-9
        )
        assert score.examples == expected["support"]


def test_the_worst_mistakes_are_those_the_model_was_surest_of(exported, evaluated, manifest, examples):
    keys, images, labels = examples
    probabilities = exported[0].predict(decoded(images, manifest), verbose=0)
    predicted, surest = probabilities.argmax(axis=1), probabilities.max(axis=1)
    wrong = sorted(np.flatnonzero(predicted != labels), key=lambda i: -surest[i])
    assert len(wrong) > MAX_MISTAKES

    found = evaluated.mistakes

    assert [mistake.key for mistake in found] == [keys[i] for i in wrong[:MAX_MISTAKES]]
    first = found[0]
    assert first.image == images[wrong[0]]
    assert (first.true, first.predicted) == (CLASS_NAMES[labels[wrong[0]]], CLASS_NAMES[predicted[wrong[0]]])
    assert first.probability == pytest.approx(surest[wrong[0]], abs=1e-6)


def test_raw_images_are_evaluated_alike(exported, evaluated, tmp_path):
    records = {"train": 12, "test": TEST_RECORDS}
    write_dataset(tmp_path, shape=SHAPE, shards=4, records=records, encoding="raw")
    ours, plain = evaluate(exported[1] / model_store.SAVED_MODEL, tmp_path), evaluated

    assert ours.confusion == plain.confusion
    assert ours.metrics["log_loss"] == pytest.approx(plain.metrics["log_loss"])
    assert [one.key for one in ours.mistakes] == [one.key for one in plain.mistakes]
    assert Image.open(io.BytesIO(ours.mistakes[0].image)).size == SHAPE[:2]


def test_a_shard_that_the_manifest_does_not_name_is_not_read(exported, dataset, tmp_path, examples):
    copy = copied(dataset, tmp_path)
    stray = make_example("stray", examples[1][0], 0)
    write_shard(copy / "test-00004-of-00005.tfrecord", [stray] * 50)

    assert evaluate(exported[1] / model_store.SAVED_MODEL, copy).examples == TEST_RECORDS


def copied(dataset, directory):
    return shutil.copytree(dataset, directory / "dataset")


def write(*examples):
    """Returns what puts examples in place of those of the test split of a dataset."""

    def damage(copy):
        shard = write_shard(copy / "test-00000-of-00001.tfrecord", [*examples])
        manifest = manifests.load(copy)
        split = manifests.Split((shard,), counted((len(examples), 0, 0)))
        manifests.save(dataclasses.replace(manifest, splits={**manifest.splits, "test": split}), copy)

    return damage


def shard_of(copy):
    return copy / "test-00002-of-00004.tfrecord"


BAND = encode_png(band_image(0, SHAPE, np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            write(make_example("a", BAND, 0), make_example("b", BAND, 3)),
            r"record 1, key 'b': .* label outside 0\.\.2",
        ),
        (write(make_example("c", b"no image", 0)), "'c' cannot be served: .*not an image that is read"),
        (write(tf.train.Example().SerializeToString()), "record 0: the example cannot be used"),
        (lambda copy: shard_of(copy).write_bytes(shard_of(copy).read_bytes()[:-5]), "the manifest says"),
        (
            lambda copy: flip(shard_of(copy)),
            r"shard test-00002.*, record \d+: a shard of the dataset is damaged",
        ),
    ],
)
def test_damaged_examples_are_refused(damage, message, exported, dataset, tmp_path):
    copy = copied(dataset, tmp_path)
    damage(copy)

    with pytest.raises(DatasetError, match=message):
        evaluate(exported[1] / model_store.SAVED_MODEL, copy)


def flip(path):
    path.write_bytes(path.read_bytes()[:-5] + b"12345")


def test_what_is_no_exported_model_is_refused(manifest, dataset, tmp_path):
    with pytest.raises(ModelError, match="cannot load the exported model"):
        evaluate(tmp_path / "nothing", dataset)

    module = tf.Module()
    module.serve = tf.function(lambda images: {"y": images}, [tf.TensorSpec([None], tf.string)])
    wider = dataclasses.replace(manifest, labels=(class_label("abcde"),))
    export(band_model(classes=5), wider, tmp_path)
    for name in ("serving_default", "other"):
        tf.saved_model.save(module, str(tmp_path / name), signatures={name: module.serve})
    for path, cause in (
        ("serving_default", "'probabilities'"),
        ("other", "'serving_default'"),
        (model_store.SAVED_MODEL, "cannot reshape"),
    ):
        with pytest.raises(ModelError, match=f"another signature, output or number of classes .*{cause}"):
            evaluate(tmp_path / path, dataset)


# From a model file to a verdict


HISTORY = 'epoch,loss,f1_score,val_loss,examples,seconds\n1,1.5,"[0, 1]",1.25,12,0.1\n2,0.5,,,12,0.1\n'
SETTINGS = {"model": "mnist_cnn", "settings": {"hparams": {"width": 8}}, "versions": {"keras": "3.15.0"}}


@pytest.fixture(scope="module")
def good(dataset, tmp_path_factory):
    """A good model with its history and settings, validated as a program does: verdict, directory, events."""
    seen, root = [], tmp_path_factory.mktemp("good")
    model_file = save(band_model(), root / "model")
    (root / "model/history.csv").write_text(HISTORY)
    (root / "model/settings.json").write_text(json.dumps(SETTINGS))
    with progress.sink(seen.append):
        blessing = validate(model_file, dataset, root / "out", gate=Gate(rules=("accuracy >= 0.95",)))
    return blessing, root, seen


@pytest.fixture(scope="module")
def weak(dataset, tmp_path_factory, clean_process):
    """A weak model that the component has validated: what it returned, its artifacts, directory."""
    root = tmp_path_factory.mktemp("weak")
    save(sometimes_wrong(), root / "model")
    task = artifacts(dataset, root / "model", root / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden, "CleanProcess", lambda: contextlib.nullcontext(clean_process))
        outcome = export_validate(**task, rules=["accuracy >= 0.95"])
    return outcome, task, root


def test_a_good_model_is_blessed(good):
    blessing, tmp_path, events = good

    assert blessing.blessed
    assert blessing.headline == "Blessed: compared with no champion, accuracy 1.0000"
    assert "accuracy 1.0000 >= 0.95" in blessing.reason
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("blessing.json", "evaluation.json", "export.json", "profile.json", "settings.json", "saved_model"),
        *("model.keras", "model_card.html", "model_card.md", "report.html"),
    }
    assert json.loads((tmp_path / "out/blessing.json").read_text())["blessed"] is True
    assert (tmp_path / "out/model.keras").read_bytes() == (tmp_path / "model/model.keras").read_bytes()
    evaluation = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert (evaluation["metrics"]["accuracy"], evaluation["examples"]) == (1.0, TEST_RECORDS)
    facts = {event.topic: (event.value, event.text) for event in events if event.kind == "fact"}
    assert facts == {
        "quality": ("accuracy 1.0000", "accuracy 1.0000 on 90 examples"),
        "blessed": (True, "compared with no champion, accuracy 1.0000"),
        "report": (str(tmp_path / "out/report.html"),) * 2,
        "model card": (str(tmp_path / "out/model_card.html"),) * 2,
        "exported model": (str(tmp_path / "out/saved_model"),) * 2,
    }
    assert [(e.done, e.total) for e in events if e.kind == "progress"][-1] == (TEST_RECORDS, TEST_RECORDS)


def test_a_weak_model_is_not_blessed(weak):
    exported = weak[2] / "out/exported"
    accuracy = json.loads((exported / model_store.EVALUATION_FILE).read_text())["metrics"]["accuracy"]
    blessing = json.loads((exported / model_store.BLESSING_FILE).read_text())

    assert blessing["blessed"] is False
    assert f"accuracy {accuracy:.4f} is below 0.95" in blessing["reason"]
    assert f"✗ {blessing['headline']}" in unescape((exported / model_store.REPORT_FILE).read_text())


def test_a_model_that_gives_nan_is_not_blessed(dataset, tmp_path, events):
    model = band_model(bias=(float("nan"), 0.0, 0.0))

    blessing = validate(save(model, tmp_path / "model"), dataset, tmp_path / "out", gate=Gate())

    assert not blessing.blessed
    assert "examples with non-finite output: 90, not 0" in blessing.reason
    evaluation = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert (evaluation["non_finite"], evaluation["metrics"].get("log_loss")) == (TEST_RECORDS, None)
    assert evaluation["mistakes"][0]["probability"] is None
    assert "probability not finite" in (tmp_path / "out/report.html").read_text()
    # It agrees with itself, and NaN is null in its golden set.
    content = json.loads((tmp_path / "out" / model_store.EXPORT_FILE).read_text())
    assert content["max_difference"] == 0.0
    assert content["golden"]["predictions"][0]["probabilities"][0] is None


def test_training_history_and_settings_reach_the_report(good):
    page = (good[1] / "out/report.html").read_text()

    assert "loss per epoch: training from 1.5 to 0.5" in page
    assert "<title>Blessed: mnist_cnn</title>" in page
    assert re.search(r">hparams\.width</th><td>8<", page)
    assert re.search(r"keras</th><td>3\.15\.0<", page)


@pytest.mark.parametrize(
    ("prepare", "error", "message"),
    [
        (lambda model, _: model.unlink(), ModelError, "no model file"),
        (
            lambda _, data: (data / "test-00001-of-00004.tfrecord").unlink(),
            DatasetError,
            "cannot read .*test-00001-of-00004.tfrecord",
        ),
        (lambda _, data: without_split(data), DatasetError, "no examples in its test split.*splits: train$"),
        (
            lambda model, _: model.with_name("settings.json").write_text("{}"),
            ModelError,
            r"settings\.json .* names no model function",
        ),
        (
            lambda model, _: model.with_name("history.csv").write_text("epoch,loss\n1,x\n"),
            ModelError,
            r"cannot read .*history\.csv",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(prepare, error, message, dataset, tmp_path, events):
    model, data = save(band_model(), tmp_path / "model"), copied(dataset, tmp_path)
    prepare(model, data)

    with pytest.raises(error, match=message):
        validate(model, data, tmp_path / "out", gate=Gate(rules=("accuracy >= 0.9",)))
    assert not (tmp_path / "out").exists()


def test_a_rule_about_a_champion_needs_a_place(weak, dataset, tmp_path, events):
    gate = Gate(rules=("accuracy > champion",))

    with pytest.raises(SettingsError, match="champion_uri is empty; set it"):
        validate(weak[2] / "model/model.keras", dataset, tmp_path / "out", gate=gate)


def without_split(dataset):
    manifest = manifests.load(dataset)
    manifests.save(dataclasses.replace(manifest, splits={"train": manifest.splits["train"]}), dataset)


def test_an_output_directory_that_is_a_file_is_refused(weak, dataset, tmp_path, events):
    (tmp_path / "out").write_text("mine")

    with pytest.raises(SettingsError, match="cannot write to the output directory"):
        validate(weak[2] / "model/model.keras", dataset, tmp_path / "out", gate=Gate())
    assert (tmp_path / "out").read_text() == "mine"


def test_a_verdict_never_outlives_the_model_it_was_reached_on(weak, dataset, tmp_path, events):
    model_file, out = weak[2] / "model/model.keras", tmp_path / "out"
    shutil.copytree(weak[2] / "out/exported", out)
    write(make_example("broken", b"no image", 0))(broken := copied(dataset, tmp_path))

    with pytest.raises(DatasetError):
        validate(model_file, broken, out, gate=Gate(rules=("accuracy >= 0.9",)))

    assert not (out / model_store.BLESSING_FILE).exists()
    assert not (out / model_store.EVALUATION_FILE).exists()


def test_validating_again_gives_the_same_verdict_and_numbers(weak, dataset, tmp_path, events):
    first, again = weak[2] / "out/exported", tmp_path / "out"
    shutil.copytree(first, again)
    gate = Gate(rules=("accuracy >= 0.95",))
    validate(weak[2] / "model/model.keras", dataset, again, gate=gate)
    runs = []
    for out in (first, again):
        costs = re.compile("latency|throughput|memory|size")
        for name in (model_store.EVALUATION_FILE, model_store.BLESSING_FILE):
            content = json.loads((out / name).read_text())
            content["metrics"] = {k: v for k, v in content["metrics"].items() if not costs.search(k)}
            runs.append(content)

    assert runs[:2] == runs[2:]


# The component


def artifacts(dataset, model_directory, out):
    return {
        "dataset": dsl.Dataset(uri=str(dataset)),
        "model": dsl.Model(uri=str(model_directory)),
        "exported": dsl.Model(uri=str(out / "exported")),
        "metrics": dsl.Metrics(uri=str(out / "metrics")),
        "confusion": dsl.ClassificationMetrics(uri=str(out / "confusion")),
        "sliced": dsl.SlicedClassificationMetrics(uri=str(out / "sliced")),
        "report": dsl.HTML(uri=str(out / "page" / "report")),
    }


def test_the_component_fills_its_artifacts(weak):
    blessed, task, tmp_path = weak

    assert blessed is False
    accuracy = task["metrics"].metadata["accuracy"]
    assert task["exported"].metadata["quality"] == f"accuracy {accuracy:.4f}"
    assert task["metrics"].metadata["examples"] == TEST_RECORDS
    slices = task["sliced"].metadata["evaluationSlices"]
    assert sorted(one["slice"] for one in slices) == sorted(f"class={name}" for name in CLASS_NAMES)
    assert slices[0]["sliceClassificationMetrics"]["confidenceMetrics"][-1]["recall"] == 1.0
    rows = [row["row"] for row in task["confusion"].metadata["confusionMatrix"]["rows"]]
    assert sum(map(sum, rows)) == TEST_RECORDS
    assert sum(rows[i][i] for i in range(3)) == round(accuracy * TEST_RECORDS)
    page = (tmp_path / "out/exported" / model_store.REPORT_FILE).read_text()
    shown = (tmp_path / "out/page/report.html").read_text()
    assert shown == page.replace('"model_card.html"', '"../exported/model_card.html"')
    assert task["exported"].metadata["blessed"] is False


def test_the_component_ends_with_one_line_and_exit_code_2(dataset, tmp_path, events):
    task = artifacts(dataset, tmp_path / "no model", tmp_path / "out")

    with pytest.raises(SystemExit) as ended:
        export_validate(**task, rules=["accuracy >= 0.95"])

    assert ended.value.code == 2
    assert [event.kind for event in events if event.kind != "line"] == ["error"]
