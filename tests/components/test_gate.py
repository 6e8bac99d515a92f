"""Verdicts on real small models: what is measured of them, and what a gate makes of it."""

import dataclasses
import functools
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from shardline.components import model_store
from shardline.components.model_store import champions
from shardline.components.validate.evaluate import ExampleBatch, Examples, find_mistakes, measure_export
from shardline.components.validate.export.export import export_model
from shardline.components.validate.export.signatures import Predictions
from shardline.components.validate.gate import evaluate_champion, judge
from shardline.components.validate.gate.champion import ChampionEvaluation, compare_models
from shardline.components.validate.metrics.evaluation import Slice
from shardline.components.validate.rules import Gate, parse_rule, parse_rules
from shardline.components.validate.validation import validate
from shardline.pipelines.cli.main import main
from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.manifest import REGRESSION, Label, Spread
from tests.helpers.datasets import write_dataset, write_table
from tests.helpers.exports import publish_next
from tests.helpers.gates import only
from tests.helpers.labels import counted
from tests.helpers.models import band_model

SHAPE = (12, 12, 3)
TEST_RECORDS = 90


PRESENT = {"bias": (4.7, 0.0, 0.0)}  # right on about two thirds


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory, shape=SHAPE, shards=2, records={"train": 12, "test": TEST_RECORDS})
    return directory


@pytest.fixture(scope="module")
def champion(dataset, tmp_path_factory):
    """A directory with a published champion that is right on about two thirds."""
    work = tmp_path_factory.mktemp("champion")
    outcome = validate(save(band_model(**PRESENT), work), dataset, work / "out", gate=only("accuracy >= 0.3"))
    publish_next(work / "out", work / "champions", accuracy=outcome.evaluation.metrics["accuracy"])
    return work / "champions"


@pytest.fixture(scope="module")
def measured(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured")
    export_model(band_model(**PRESENT), manifests.load(dataset), out)
    return measure_export(out / model_store.SAVED_MODEL, examples(dataset))


def examples(directory):
    return Examples(directory, manifests.load(directory))


def save(model, directory):
    model.save(directory / "model.keras")
    return directory / "model.keras"


# What is measured


def test_what_it_costs_is_measured(measured):
    found = measured.evaluation.metrics

    assert 0 < found["latency_p50_ms"] <= found["latency_p95_ms"]
    assert 0 < found["latency_batch32_p50_ms"] <= found["latency_batch32_p95_ms"]
    assert found["throughput"] > 0
    assert 0 < found["size_mb"] < 1
    assert found["peak_memory_mb"] > 100
    assert found["batch_difference"] < 1e-5


def test_copies_count_as_one_example(champion, tmp_path):
    manifest = write_dataset(tmp_path, shape=SHAPE, shards=1, records={"train": 12, "test": 40})
    (version,) = (champion / "versions").iterdir()
    saved_model = version / model_store.SAVED_MODEL
    alone = measure_export(saved_model, Examples(tmp_path, manifest)).evaluation
    split = manifest.splits["test"]
    path = tmp_path / split.shards[0].file
    path.write_bytes(2 * path.read_bytes())
    shard = dataclasses.replace(split.shards[0], records=80, bytes=path.stat().st_size)
    twice = counted([2 * count for count in split.labels["label"].counts])
    splits = {**manifest.splits, "test": dataclasses.replace(split, shards=(shard,), labels=twice)}

    found = measure_export(
        saved_model, Examples(tmp_path, dataclasses.replace(manifest, splits=splits))
    ).evaluation

    assert (found.examples, found.metrics["accuracy"]) == (80, alone.metrics["accuracy"])
    assert found.intervals["accuracy"] == alone.intervals["accuracy"]
    judged = judge(found, parse_rules(["examples: examples >= 50"]))
    assert judged.reason == "test examples: 40, below 50 (80 with their copies)"

    chance = dataclasses.replace(manifest, splits=splits, duplicates=manifests.Duplicates(40, by_chance=True))
    rows = measure_export(saved_model, Examples(tmp_path, chance)).evaluation
    assert rows.metrics["examples"] == 80
    assert np.ptp(rows.intervals["accuracy"]) < np.ptp(found.intervals["accuracy"])


def test_calibration_is_that_of_every_example(measured):
    bins, outcomes = measured.evaluation.calibration, measured.outcomes["label"]
    confidence = outcomes.outputs.max(axis=1)

    assert sum(item.examples for item in bins) == TEST_RECORDS
    for item in bins:
        inside = (confidence > item.lower) & (confidence <= item.upper)
        assert item.examples == inside.sum()
        assert item.accuracy == pytest.approx(outcomes.right[inside].mean())
    by_hand = sum(item.examples * abs(item.accuracy - item.confidence) for item in bins) / TEST_RECORDS
    assert measured.evaluation.metrics["ece"] == pytest.approx(by_hand)


def test_intervals_hold_their_value(measured):
    evaluation = measured.evaluation

    assert set(evaluation.intervals) >= {"accuracy", "macro_f1", "recall[class=top]", "f1[class=bottom]"}
    for name in ("accuracy", "macro_precision", "macro_recall", "macro_f1", "weighted_f1"):
        lower, upper = evaluation.intervals[name]
        assert lower < evaluation.metrics[name] < upper
    # The normal approximation of a share's interval.
    share = evaluation.metrics["accuracy"]
    half = 1.96 * np.sqrt(share * (1 - share) / TEST_RECORDS)
    lower, upper = evaluation.intervals["accuracy"]
    assert upper - lower == pytest.approx(2 * half, rel=0.15)


def test_the_evaluation_can_be_written(measured):
    evaluation = compare_models(measured, measured)
    content = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))

    lead = evaluation.leads["accuracy"]
    assert lead.p == 0.5
    assert -0.05 < lead.interval[0] < 0 < lead.interval[1] < 0.05
    assert content["champion"]["metrics"]["accuracy"] == content["metrics"]["accuracy"]
    assert content["champion"]["champion"] is None


def test_a_class_that_is_never_predicted_and_too_small_to_judge_is_named(measured):
    few = dataclasses.replace(
        measured.evaluation,
        confusion=((0, 2, 6), (1, 1, 9), (2, 2, 9)),
        slices=(Slice("class=top", 6, 0.0, False),),
    )
    counted = dataclasses.replace(measured, evaluation=few).with_counts().evaluation
    judged = judge(counted, parse_rules(["classes: never_predicted == 0"]))

    assert (judged.rules[0].verdict, judged.rules[0].note) == (
        *("passed", "fewer than 10 examples, not judged: top"),
    )
    assert judged.warnings[0] == "Never predicted: top (6); fewer than 10 test examples are not judged"


def test_errors_of_all_batches_rank_on_one_scale():
    label = Label("label", REGRESSION, ("price",))

    def worst(true, predicted):
        values = {"city": np.array(["Ulm", "é" * 500])}
        batch = ExampleBatch(None, {"label": np.array(true, np.float32)}, ("a", "b"), None, values)
        answer = Predictions({"label": np.array(predicted, np.float32)[:, None]}, {})
        return list(find_mistakes(label, batch, answer, [Spread(0.0, 2000.0, 900.0, 10.0)]))

    (wrong, index, mistake), _ = worst([1.0, 2.0], [1.5, 4.0])
    assert (wrong, index, mistake.error) == (0.2, 1, 2.0)
    assert (mistake.true, mistake.predicted) == ("2", "4")
    assert len(mistake.values["city"]) == 400
    assert worst([1000.0, 2000.0], [1000.0, 2004.0])[0][0] > wrong  # also among large numbers


def test_a_table_is_sliced_by_its_columns(tmp_path):
    manifest = write_table(tmp_path / "data", records={"train": 12, "test": 60})
    columns = {
        name: keras.Input((), dtype=feature.dtype, name=name) for name, feature in manifest.inputs.items()
    }
    year = keras.ops.cast(columns["year"], "float32")
    outputs = keras.layers.Dense(3, "softmax")(keras.ops.expand_dims(year - 2005.0, -1))
    model = keras.Model(columns, outputs)
    model.compile("sgd", "sparse_categorical_crossentropy")
    export_model(model, manifest, tmp_path / "out")

    saved_model = tmp_path / "out" / model_store.SAVED_MODEL
    evaluation = measure_export(saved_model, examples(tmp_path / "data"), min_slice=20).evaluation

    names = {item.name.partition("=")[0] for item in evaluation.slices}
    assert names == {"class", "year", "income", "city"}
    assert {*evaluation.mistakes[0].values} == {"year", "income", "city"}
    assert "values" not in evaluation.to_json()["mistakes"][0]
    cities = [item for item in evaluation.slices if item.name.startswith("city=")]
    assert [item.name for item in cities] == ["city=Bern", "city=Rom", "city=Ulm"]
    assert sum(item.examples for item in cities) == 60
    assert [item.decided for item in cities] == [item.examples >= 20 for item in cities]
    incomes = [item for item in evaluation.slices if item.name.startswith("income=")]
    assert [item.examples for item in incomes] == [15, 15, 15, 15]


# The verdicts


NOT_WORSE = ["accuracy >= champion - 0.005"]
AHEAD = ["accuracy > champion (p < 0.05)"]
MODELS = {
    "worse": {"bias": (5.5, 0, 0)},
    "equal": PRESENT,
    "better": {},
    "blind to one class": {"bias": (0, 0, -9.0)},
}


@pytest.fixture(scope="module")
def champion_evaluations(dataset, champion, measured, tmp_path_factory):
    """Returns what was measured of a model, compared with the champion; once, however often it is judged."""

    @functools.cache
    def challenger(name):
        if name == "equal":
            return measured
        out = tmp_path_factory.mktemp("challenger")
        export_model(band_model(**MODELS[name]), manifests.load(dataset), out)
        return measure_export(out / model_store.SAVED_MODEL, examples(dataset))

    @functools.cache
    def evaluate_against(name, compared):
        if not compared:
            return ChampionEvaluation(challenger(name).evaluation)
        return evaluate_champion(challenger(name), str(champion), examples(dataset))

    return evaluate_against


@pytest.mark.parametrize(
    ("model", "rules", "blessed", "reason"),
    [
        ("worse", NOT_WORSE, False, " is below "),
        ("equal", NOT_WORSE, True, "accuracy"),
        ("equal", AHEAD, False, "accuracy 0.6222 is not significantly above 0.6222 (p = 0.500"),
        ("better", [*NOT_WORSE, *AHEAD, "worst_slice(accuracy) >= 0.9"], True, "accuracy"),
        # Better overall.
        (
            "blind to one class",
            ["accuracy >= champion", "recall[class=bottom] >= champion - 0.01"],
            False,
            "recall[class=bottom] 0.0000 is below",
        ),
        ("blind to one class", ["worst_slice(recall) >= 0.5"], False, "class=bottom"),
        ("better", ["size_mb <= 0.001"], False, "size_mb"),
        ("better", ["latency_p50_ms <= 0"], False, "latency_p50_ms"),
    ],
)
def test_each_model_gets_the_verdict_that_it_deserves(model, rules, blessed, reason, champion_evaluations):
    parsed = parse_rules(rules)
    compared = champion_evaluations(model, any(rule.reference for rule in parsed))

    blessing = judge(compared.evaluation, parsed, missing=compared.missing)

    assert blessing.blessed == blessed, blessing.reason
    assert reason in blessing.reason


@pytest.mark.parametrize(
    ("damage", "because"),
    [
        (lambda store, _: (store / "champion.json").write_text("{"), "champion.json is not JSON"),
        (
            lambda store, publish_into: publish_into(
                store, labels=[{"name": "label", "kind": "class", "outputs": ["a", "b", "c"]}]
            ),
            "has other classes",
        ),
        (lambda store, publish_into: publish_into(store, inputs={"year": {}}), "has other inputs (year)"),
        (
            lambda store, publish_into: write_when_loaded(publish_into(store), store / "written"),
            "reads or writes files while it predicts (WriteFile)",
        ),
    ],
)
def test_a_champion_that_cannot_be_measured_is_never_ignored(
    damage, because, dataset, champion, tmp_path, measured
):
    def publish_into(store, **changes):
        shutil.copytree(champion, store, dirs_exist_ok=True)
        (version,) = (store / "versions").iterdir()
        content = json.loads((version / "export.json").read_text())
        (version / "export.json").write_text(json.dumps(content | changes))
        return version / "saved_model"

    store = tmp_path / "champions"
    store.mkdir()
    damage(store, publish_into)
    rules = parse_rules(["accuracy >= 0.3", "accuracy >= champion"])

    compared = evaluate_champion(measured, str(store), examples(dataset))

    assert because in compared.missing.reason
    for first_run in ("bless", "block"):
        blessing = judge(compared.evaluation, rules, Gate(first_run=first_run), missing=compared.missing)
        assert (blessing.blessed, blessing.rules[1].verdict) == (False, "failed")
        assert because in blessing.reason
    assert not (store / "written").exists()


class WritesWhenLoaded(tf.lookup.KeyValueTensorInitializer):
    """The values of a table, whose initialization writes a file: a loader runs it."""

    def __init__(self, path):
        super().__init__(["a"], [1])
        self._path = str(path)

    def initialize(self, table):
        tf.io.write_file(self._path, "x")
        return super().initialize(table)


def write_when_loaded(saved_model, path):
    module = tf.Module()
    module.table = tf.lookup.StaticHashTable(WritesWhenLoaded(path), 0)
    module.serve = tf.function(module.table.lookup, input_signature=[tf.TensorSpec([None], tf.string)])
    tf.saved_model.save(module, saved_model, signatures=module.serve)
    path.unlink()
    tf.saved_model.load(saved_model)
    path.unlink()  # it was written


def test_only_an_empty_model_store_is_a_first_run(dataset, champion, tmp_path, measured, events):
    def evaluate_against(store):
        return evaluate_champion(measured, str(store), examples(dataset))

    (tmp_path / "empty").mkdir()
    gone = shutil.copytree(champion, tmp_path / "gone")
    (gone / "champion.json").unlink()

    empty, without_record = evaluate_against(tmp_path / "empty"), evaluate_against(gone)

    assert (empty.champion, empty.missing.first, empty.evaluation.champion) == ("", True, None)
    assert not [event for event in events if "measuring the champion" in event.text]
    assert not without_record.missing.first
    assert "champion.json is gone, but" in without_record.missing.reason
    with pytest.raises(SettingsError, match=r"there is no directory .*mount the disk .*or begin"):
        evaluate_against(tmp_path / "mnt")


def test_the_best_of_the_last_champions_is_measured_by_its_predictions_alone(
    dataset, champion, tmp_path, measured, events
):
    (version,) = champions.versions(champion)
    exported = shutil.copytree(champion / version.path, tmp_path / "exported")
    content = json.loads((exported / "blessing.json").read_text())
    best_of_8 = parse_rule("accuracy >= best(8) (within 0.01)")
    store, names = tmp_path / "champions", []
    for accuracy in (0.9, 0.99, 0.999, 0.5):
        content["metrics"]["accuracy"] = accuracy
        (exported / "blessing.json").write_text(json.dumps(content))
        names.append(publish_next(exported, store, run=str(accuracy)).version)
    shutil.rmtree(store / "versions" / names[2] / "saved_model")

    found = evaluate_champion(measured, str(store), examples(dataset), rules=[best_of_8])

    best = found.evaluation.best["accuracy"]
    assert (found.champion, best.version, best.compared) == (names[3], names[1], 3)
    assert best.value == found.evaluation.metrics["accuracy"]
    assert best.lead.difference == 0
    assert f"{names[2]} is left out: cannot load the exported model" in best.note
    told = [event.text for event in events if event.text.startswith("measuring")]
    earlier = [f"measuring the earlier champion {name} on the same examples" for name in names[2:0:-1]]
    assert told == [f"measuring the champion {names[3]} on the same examples", *earlier]
    assert found.evaluation.to_json()["best"]["accuracy"]["version"] == names[1]


def trained_on(dataset, copy, counts):
    """Copies a dataset; of its training split the copy says that it has so many examples of each class."""
    manifest = manifests.load(shutil.copytree(dataset, copy))
    train = dataclasses.replace(manifest.splits["train"], labels=counted(counts))
    manifests.save(dataclasses.replace(manifest, splits={**manifest.splits, "train": train}), copy)
    return copy


def test_what_decides_nothing_is_a_warning(dataset, tmp_path):
    copy = trained_on(dataset, tmp_path / "data", (6, 6, 0))
    (tmp_path / "champions").mkdir()
    blessing = validate(
        save(band_model(), tmp_path),
        copy,
        tmp_path / "out",
        gate=only("max_difference <= 1e-5", champion_uri=str(tmp_path / "champions")),
    ).blessing

    assert blessing.blessed
    assert blessing.warnings[0] == "Without examples in training: bottom"
    assert json.loads((tmp_path / "out/blessing.json").read_text())["reason"] == blessing.reason


def test_a_constant_model_is_blocked_where_the_test_split_has_one_class(dataset, tmp_path):
    copy = trained_on(dataset, tmp_path / "data", (12, 0, 0))
    model = save(band_model(bias=(99.0, 0.0, 0.0)), tmp_path)
    gate = Gate(rules=("baseline: off", "classes: off"), allow_unmeasured=True)
    blessing = validate(model, copy, tmp_path / "out", gate=gate).blessing

    assert not blessing.blessed
    assert (
        "Not blessed: cannot be judged, the test split has no class but 'top' that training has"
        in blessing.headline
    )


# The command


def test_the_command_ends_with_the_verdict(dataset, champion, tmp_path):
    model = save(band_model(), tmp_path)
    (tmp_path / "gate.toml").write_text('rules = ["accuracy >= champion"]\n')

    def invoke(*options):
        arguments = ["validate", str(model), str(dataset), str(tmp_path / "out"), *map(str, options)]
        return CliRunner().invoke(main, arguments)

    blessed = invoke("--rules", tmp_path / "gate.toml", "--rule", "ece <= 0.9", "--champion", champion)
    assert blessed.exit_code == 0, blessed.output
    compared = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert {item["feature"] for item in compared["drift"]} >= {"label", "image brightness"}
    assert compared["metrics"]["drifted"] == 0
    content = json.loads((tmp_path / "out/blessing.json").read_text())
    assert [rule["rule"] for rule in content["rules"][-2:]] == ["accuracy >= champion", "ece <= 0.9"]
    assert "points better than the champion" in content["headline"]
    mistyped = invoke("--rule", "acuracy >= 0.9")
    assert (mistyped.exit_code, mistyped.output.count("\n")) == (2, 1)
    assert "there is no metric 'acuracy'" in mistyped.output
