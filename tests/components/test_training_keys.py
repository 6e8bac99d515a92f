"""Fair comparison with the champion: test examples that it was trained on are left out.

The models here learn by heart: each answers as the most similar training image does. On what they were
trained on they are always right, on the others, which are noise, as often as not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.components.model_store import KEYS_FILE, Export
from shardline.components.model_store.champions import publish as publish_model
from shardline.components.preprocess.sources.example import Example
from shardline.components.validate import validation
from shardline.components.validate.evaluate import Examples
from shardline.components.validate.gate import TrainingKeys
from shardline.components.validate.gate.champion import describe_overlap, find_training_overlap
from shardline.trainer.base.errors import DatasetError, ModelError
from tests.helpers.gates import only
from tests.helpers.preprocessing import read, run

EXAMPLES = 600


class Noise:
    """Noise in two classes, without splits of its own."""

    class_names = ("no", "yes")
    own: int | None = None

    def __iter__(self):
        rng = np.random.default_rng(0)
        for index in range(EXAMPLES):
            pixels = rng.integers(0, 256, (4, 4, 1), dtype=np.uint8)
            split = None if self.own is None else ("train", "test")[(index + self.own) % 2]
            yield Example(f"{index:04d}", int(rng.integers(2)), pixels, split)


class Even(Noise):
    """The same, whose own training split are the even ones."""

    own = 0


class Odd(Noise):
    """The same, whose own training split are the odd ones."""

    own = 1


def learn_by_heart(dataset: Path, out: Path) -> Path:
    """Writes a model that gives the label of the nearest training image."""
    trained = read(dataset, "train")
    pixels = np.stack([tf.io.decode_image(one["image"]).numpy().ravel() for one in trained]) / 255
    labels = np.array([one["label"] for one in trained])
    layers = [keras.Input((4, 4, 1), dtype="uint8"), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
    layers += [keras.layers.Dense(len(pixels), "softmax"), keras.layers.Dense(2, use_bias=False)]
    model = keras.Sequential(layers)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
    sharpness = 1000.0
    model.layers[-2].set_weights([2 * sharpness * pixels.T, -sharpness * (pixels**2).sum(axis=1)])
    model.layers[-1].set_weights([np.eye(2)[labels]])
    out.mkdir()
    model.save(out / "model.keras")
    (out / "settings.json").write_text(json.dumps({"model": "mnist_cnn", "head": "probabilities"}))
    return out / "model.keras"


@pytest.fixture(scope="module")
def make_dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Examples]:
    """Returns the test examples of a dataset of noise, which is made once: no test writes into it."""
    made: dict[str, Examples] = {}

    def make(source: str = "Noise", **settings: Any) -> Examples:
        arguments = {"split": {"train": 0.5, "test": 0.5}, "shards": 2} | settings
        name = json.dumps([source, arguments], sort_keys=True)
        if name not in made:
            out = tmp_path_factory.mktemp("noise") / "data"
            made[name] = Examples(out, run(f"{__name__}:{source}", out, **arguments))
        return made[name]

    return make


def publish(examples: Examples, out: Path, **data: Any) -> Path:
    """Writes what an export says of its training data into a directory, as if it were published there."""
    keys = TrainingKeys.of(examples.directory, examples.manifest, **data)
    out.mkdir()
    keys.write(out)
    Export(fingerprint=examples.manifest.fingerprint, training_data=keys.data).write(out)
    return out


def keys_of(examples: Examples, split: str) -> list[bytes]:
    return [one["key"] for one in read(examples.directory, split)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"split_salt": 1}),
        ({"key": "content"}, {"key": "content", "split_salt": 1}),
        ({}, {"split": {"train": 0.2, "validation": 0.1, "test": 0.7}}),
        ({}, {"source": "Even"}),
    ],
)
def test_examples_that_another_model_was_trained_on_are_found(first, second, make_dataset, tmp_path):
    earlier, later = make_dataset(**first), make_dataset(**second)

    found = find_training_overlap(publish(earlier, tmp_path / "champion"), later)

    trained = set(keys_of(earlier, "train"))
    assert found is not None
    assert found.tolist() == [key in trained for key in keys_of(later, "test")]
    assert 50 < found.sum() < len(found) - 50


def test_a_group_that_another_model_has_seen_is_left_out_as_a_whole(make_dataset, tmp_path):
    champion, later = publish(make_dataset(), tmp_path / "champion"), make_dataset(split_salt=1)
    alone = find_training_overlap(champion, later)
    pairs = np.arange(len(alone)) // 2
    found = find_training_overlap(champion, later, pairs)
    assert found.tolist() == [any(alone[pairs == pair]) for pair in pairs]
    with pytest.raises(ModelError, match=r"test examples or their groups, and the other 0 are too few"):
        find_training_overlap(champion, later, np.zeros(len(alone), int))


def test_the_record_says_how_the_training_split_came_about(make_dataset, tmp_path):
    data = Export.read(publish(make_dataset(split_salt=5, seed=2), tmp_path / "champion")).training_data
    again = Export.read(publish(make_dataset(split_salt=5, shards=4), tmp_path / "again")).training_data

    assert data == again  # neither seed nor shards are in it
    assert data is not None
    assert (data.salt, data.key, data.shares) == (5, "path", {"train": 0.5, "test": 0.5})


def test_a_model_that_is_validated_on_another_dataset_than_it_was_trained_on(make_dataset, tmp_path):
    trained, later = make_dataset(), make_dataset(split_salt=1)
    model = learn_by_heart(trained.directory, tmp_path / "model")
    known = {"fingerprint": trained.manifest.fingerprint, "head": "probabilities"}
    (tmp_path / "model" / "settings.json").write_text(json.dumps({"model": "mnist_cnn", **known}))

    done = validation.validate(model, later.directory, tmp_path / "out", gate=only())

    assert done.blessing.warnings[0] == (
        f"The model was trained on another dataset (fingerprint {trained.manifest.fingerprint}): whether it "
        "has seen the test examples is not known"
    )
    assert Export.read(tmp_path / "out").training_data is None
    assert not {KEYS_FILE, "profile.json"} & {path.name for path in (tmp_path / "out").iterdir()}
    # Neither its own test split nor this one is taken for the other later.
    assert find_training_overlap(tmp_path / "out", later) is None
    assert describe_overlap(find_training_overlap(tmp_path / "out", trained)) == ""


def test_too_few_that_the_champion_has_not_seen_are_no_comparison(make_dataset, tmp_path):
    earlier, later = make_dataset("Even"), make_dataset("Odd")

    with pytest.raises(ModelError, match="trained on 300 of the 300 test examples, and the other 0 are too"):
        find_training_overlap(publish(earlier, tmp_path / "champion"), later)


def test_what_a_model_without_keys_was_trained_on_is_not_known(make_dataset, tmp_path):
    earlier, later = make_dataset(), make_dataset(split_salt=1)
    champion = publish(earlier, tmp_path / "champion")
    Export(fingerprint=earlier.manifest.fingerprint).write(champion)

    assert describe_overlap(find_training_overlap(champion, later)).startswith("It is not known")
    # Of the same dataset it is known all the same.
    assert describe_overlap(find_training_overlap(champion, earlier)) == ""


def test_keys_of_names_and_of_contents_are_not_compared(make_dataset, tmp_path):
    earlier, later = make_dataset(), make_dataset(key="content")

    assert find_training_overlap(publish(earlier, tmp_path / "champion"), later) is None


@pytest.mark.parametrize("key", ["path", "content"])
def test_numbers_of_rows_are_no_keys(key, tmp_path):
    lines = [f"{number},{'no' if number % 2 else 'yes'}" for number in range(EXAMPLES)]
    found = []
    for name, rows in {"1": lines, "2": ["-1,yes", *lines]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["value,label", *rows]))
        settings = {"split": {"train": 0.5, "test": 0.5}, "key": key, "encoding": "keep"}
        manifest = run(f"table:{tmp_path / name}.csv", tmp_path / name, **settings)
        found.append(Examples(tmp_path / name, manifest))
    earlier, later = found

    champion = publish(earlier, tmp_path / "champion")

    if key == "content":
        assert describe_overlap(find_training_overlap(champion, later)) == ""
        return
    assert (earlier.manifest.keys, (tmp_path / "1" / "examples.keys").exists()) == (None, False)
    assert "has no keys" in describe_overlap(find_training_overlap(champion, later))
    assert describe_overlap(find_training_overlap(champion, earlier)) == ""


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-8])])
def test_damaged_keys_are_refused(damage, make_dataset, tmp_path):
    examples = make_dataset()
    champion = publish(examples, tmp_path / "champion")
    damage(champion / KEYS_FILE)
    damaged = replace(examples, directory=shutil.copytree(examples.directory, tmp_path / "damaged"))
    damage(damaged.directory / "examples.keys")

    with pytest.raises(DatasetError, match=r"examples\.keys"):
        find_training_overlap(champion, damaged)
    with pytest.raises(ModelError, match=r"training\.keys"):
        find_training_overlap(champion, make_dataset(split_salt=1))


def test_what_a_training_started_from_counts_as_its_training(make_dataset, tmp_path):
    first, second = make_dataset(), make_dataset(split_salt=1)
    start = publish(first, tmp_path / "start")

    champion = publish(second, tmp_path / "champion", start=str(start / "model.keras"))

    trained = {*keys_of(first, "train"), *keys_of(second, "train")}
    seen = find_training_overlap(champion, first)
    assert seen is not None
    assert seen.tolist() == [key in trained for key in keys_of(first, "test")]
    assert seen.any()
    data = Export.read(champion).training_data
    assert data is not None
    assert data.records == len(trained)
    own = TrainingKeys.of(second.directory, second.manifest, start=str(start))
    leaked = len({*keys_of(first, "train")} & {*keys_of(second, "test")})
    assert own.describe_leak(second).startswith(
        f"Trained on {leaked} of the {second.split.records} test examples"
    )
    assert TrainingKeys.of(second.directory, second.manifest).describe_leak(second) == ""


@pytest.mark.parametrize("start", ["gs://nothing/mounted", "{tmp}/model/model.keras", "{tmp}/content"])
def test_what_an_unknown_start_was_trained_on_is_not_known(start, make_dataset, tmp_path):
    examples = make_dataset()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.keras").write_bytes(b"")
    publish(make_dataset(key="content"), tmp_path / "content")
    start = start.format(tmp=tmp_path)

    keys = TrainingKeys.of(examples.directory, examples.manifest, start=start)
    champion = publish(examples, tmp_path / "champion", start=start)
    of_champion = TrainingKeys.of(examples.directory, examples.manifest, start=str(champion))

    assert keys.warning.startswith(f"The training data of initial_model ({start}) are not known: they may")
    assert "are not known" in of_champion.warning
    data = Export.read(champion).training_data
    assert data is not None
    assert not data.complete
    assert describe_overlap(find_training_overlap(champion, examples), data) == (
        "The training data of the champion's initial model are not known"
    )


def test_a_champion_that_knows_its_training_by_heart_is_compared_on_the_others(make_dataset, tmp_path):
    store, warnings = tmp_path / "champions", []
    store.mkdir()
    for name, salt in (("first", 0), ("second", 1)):
        dataset = make_dataset(split_salt=salt).directory
        model = learn_by_heart(dataset, tmp_path / f"{name}-model")
        out = tmp_path / f"{name}-out"
        done = validation.validate(model, dataset, out, gate=only(champion_uri=str(store)))
        publish_model(out, store)
        warnings.append(done.blessing.warnings)

    found = json.loads((out / "evaluation.json").read_text())
    remaining = found["examples"] - found["left_out"]
    assert min(found["left_out"], remaining) > 100
    assert found["compared"]["examples"] == found["champion"]["examples"] == remaining
    # On what neither was trained on they are alike; on all examples the champion would be much better.
    ours, theirs = (found[name]["metrics"]["accuracy"] for name in ("compared", "champion"))
    assert 0.3 < theirs < 0.7
    assert found["leads"]["accuracy"]["difference"] == pytest.approx(ours - theirs)
    assert found["leads"]["accuracy"]["interval"][1] > 0
    assert warnings[1][0] == (
        f"Compared with the champion on {remaining} of the {found['examples']} examples: it was trained on "
        f"the other {found['left_out']}"
    )
    page = (out / "report.html").read_text()
    assert f"without the {found['left_out']} that the champion was trained on" in page
