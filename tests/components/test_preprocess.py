"""Preprocessing from end to end: source strings to dataset directories, and everything that is refused."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kfp import dsl
from PIL import Image

from components.preprocess import component, directory
from components.preprocess.run import PreprocessSettings, preprocess
from components.preprocess.sources import open_source
from trainer import progress
from trainer.data import manifest as manifests
from trainer.data.manifest import SPLITS, Manifest
from trainer.errors import RunError, SettingsError, ShardlineError, SourceError

REPOSITORY = Path(__file__).parents[2]

# Its own code uses functions of protobuf that are deprecated.
TFDS = pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")


def run(source: str, out: Path, **settings: Any) -> Manifest:
    return preprocess(PreprocessSettings(source=source, **settings), out)


def read(out: Path, split: str) -> list[dict[str, Any]]:
    """Returns the examples of a split as TensorFlow alone reads them, shard by shard."""
    specification = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "key": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    shards = manifests.load(out).splits[split].shards
    return [
        {name: value.numpy() for name, value in tf.io.parse_single_example(record, specification).items()}
        for shard in shards
        for record in tf.data.TFRecordDataset(str(out / shard.file))
    ]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def write_images(
    root: Path, *, classes: Sequence[str] = ("cat", "dog"), each: int = 25, size: int = 8
) -> Path:
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for index in range(each):
            pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index:03d}.png")
    return root


@pytest.fixture(autouse=True)
def events() -> Iterator[list[progress.Event]]:
    """Collects what is reported."""
    collected: list[progress.Event] = []
    with progress.sink(collected.append):
        yield collected


@pytest.fixture
def source_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file in the working directory in which a test writes a source of its own, as module `mine`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)


@pytest.fixture(scope="session")
def test_data() -> Path:
    path = os.environ.get("SHARDLINE_TEST_DATA")
    if not path:
        pytest.skip("SHARDLINE_TEST_DATA does not name a directory with tfds/ and photos/")
    return Path(path).resolve()


def test_digits(tmp_path: Path, events: list[progress.Event]) -> None:
    out = tmp_path / "a" / "dataset"
    manifest = run("digits", out, readers=2)
    assert manifests.load(out) == manifest
    assert manifest.info().input_shape == (8, 8, 1)
    examples = [example for split in SPLITS for example in read(out, split)]
    assert len(examples) == len({example["key"] for example in examples}) == 1797

    from sklearn.datasets import load_digits

    expected = {
        f"digits/{i:04d}".encode(): (d, label)
        for i, (d, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True))
    }
    for example in examples:
        ink, label = expected[example["key"]]
        pixels = tf.io.decode_png(example["image"], channels=1).numpy()
        assert np.array_equal(pixels.ravel(), np.rint(ink * 255 / 16))
        assert example["label"] == label

    records = {name: split.records for name, split in manifest.splits.items()}
    assert [event.text for event in events if event.kind == "line"] == [
        f"1,797 records of 10 classes: train {records['train']:,} in 8 shards, "
        f"validation {records['validation']} in 2, test {records['test']} in 2"
    ]
    facts = {event.topic: event.value for event in events if event.kind == "fact"}
    assert facts == {"dataset": manifest.fingerprint, "records": 1797}


def test_the_manifest_states_what_the_shards_hold(tmp_path: Path) -> None:
    manifest = run("digits", tmp_path / "out", readers=3)
    files = {shard.file for split in manifest.splits.values() for shard in split.shards}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files | {"manifest.json"}
    for name, split in manifest.splits.items():
        labels = [example["label"] for example in read(tmp_path / "out", name)]
        assert split.class_counts == tuple(labels.count(label) for label in range(10))
        sizes = [shard.records for shard in split.shards]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert len(sizes) % 3 == 0
        for shard in split.shards:
            assert shard.bytes == (tmp_path / "out" / shard.file).stat().st_size


def test_a_second_run_gives_the_same_bytes(tmp_path: Path) -> None:
    first = run("digits", tmp_path / "first", readers=2)
    second = run("digits", tmp_path / "second", readers=2)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    assert first.fingerprint == second.fingerprint


def test_the_fingerprint_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    here, there = write_images(tmp_path / "here"), write_images(tmp_path / "there")
    first = run(f"images:{here}", tmp_path / "1")
    assert run(f"images:{there}", tmp_path / "2", data_dir="elsewhere").fingerprint == first.fingerprint
    assert run(f"images:{here}", tmp_path / "3", seed=1).fingerprint != first.fingerprint
    assert run(f"images:{here}", tmp_path / "4", image_size=6).fingerprint != first.fingerprint
    (here / "cat").rename(here / "lynx")
    assert run(f"images:{here}", tmp_path / "5").fingerprint != first.fingerprint


def test_examples_keep_their_split_when_the_data_grows(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")

    def split_of(out: Path) -> dict[bytes, str]:
        run(f"images:{images}", out)
        return {example["key"]: split for split in SPLITS for example in read(out, split)}

    before = split_of(tmp_path / "before")
    for index in range(30):
        Image.new("RGB", (8, 8)).save(images / "cat" / f"a{index}.png")
    after = split_of(tmp_path / "after")
    assert len(after) == len(before) + 30
    assert {key: after[key] for key in before} == before


def test_images_keep_their_bytes(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    (images / ".DS_Store").write_text("hidden")
    (images / "dog" / ".hidden").write_text("hidden")
    (images / "dog" / "more é\n").mkdir()
    Image.new("RGB", (8, 8)).save(images / "dog" / "more é\n" / "1.png")
    manifest = run(f"images:{images}", tmp_path / "out")
    assert manifest.class_names == ("cat", "dog")
    examples = [example for split in SPLITS for example in read(tmp_path / "out", split)]
    assert len(examples) == 51
    for example in examples:
        assert example["image"] == (images / os.fsdecode(example["key"])).read_bytes()
        assert manifest.class_names[example["label"]] == example["key"].decode().split("/")[0]


def test_photos_with_image_size(tmp_path: Path, test_data: Path) -> None:
    manifest = run(f"images:{test_data / 'photos'}", tmp_path / "out", image_size=96)
    assert manifest.class_names == ("ants", "bees")
    assert manifest.image == manifests.Feature("image", "uint8", (96, 96, 3), "jpeg", "crop")
    examples = [example for split in SPLITS for example in read(tmp_path / "out", split)]
    assert len(examples) == len(list((test_data / "photos").glob("*/*.jpg")))
    assert {tf.io.decode_jpeg(example["image"]).shape for example in examples} == {(96, 96, 3)}


def test_photos_without_image_size_are_refused(tmp_path: Path, test_data: Path) -> None:
    with pytest.raises(SourceError, match=r"the images differ in size \(width .*give image_size"):
        run(f"images:{test_data / 'photos'}", tmp_path / "out")


@TFDS
def test_mnist_from_tfds(tmp_path: Path, test_data: Path) -> None:
    manifest = run("tfds:mnist", tmp_path / "out", data_dir=str(test_data / "tfds"), readers=2)
    assert manifest.info().input_shape == (28, 28, 1)
    assert manifest.class_names == tuple("0123456789")
    records = manifest.info().records
    assert records["test"] == 10_000
    assert records["train"] + records["validation"] == 60_000
    assert records["validation"] == pytest.approx(6_000, rel=0.05)
    # The number of each digit in MNIST's test set is well known.
    assert manifest.splits["test"].class_counts == (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
    example = read(tmp_path / "out", "test")[0]
    assert example["key"].startswith(b"mnist-test")
    assert tf.io.decode_png(example["image"]).shape == (28, 28, 1)


@TFDS
@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "mnsit", "TensorFlow Datasets has no 'mnsit'; similar: mnist.*; prepared in .*: mnist", id="typo"
        ),
        pytest.param(
            "mnist:blue", "cannot open 'tfds:mnist:blue': .*BuilderConfig blue not found", id="config"
        ),
        pytest.param(
            "cifar10",
            "'tfds:cifar10' is not prepared in .*, which has mnist; prepare it with 'tfds build",
            id="missing",
        ),
        pytest.param("../mnist", "cannot open 'tfds:../mnist'", id="not a name"),
    ],
)
def test_tfds_datasets_that_cannot_be_read(test_data: Path, name: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_source(f"tfds:{name}", data_dir=str(test_data / "tfds"))


def test_a_users_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    manifest = run("examples.shapes.source:Shapes", tmp_path / "out")
    assert manifest.class_names == ("circle", "square", "triangle")
    assert sum(manifest.info().records.values()) == 600
    assert manifest.info().input_shape == (24, 24, 3)
    originals = {example.key.encode(): example for example in open_source("examples.shapes.source:Shapes")}
    for example in read(tmp_path / "out", "test"):
        original = originals[example["key"]]
        assert np.array_equal(tf.io.decode_png(example["image"]).numpy(), original.image)
        assert example["label"] == original.label


SOURCE = """
import numpy as np
from pathlib import Path
from components.preprocess.sources import Example

IMAGE = np.zeros((8, 8, 1), np.uint8)

def example(index, **changes):
    values = dict(key=str(index), label=index % 2, image=IMAGE)
    return Example(**(values | changes))

class Source:
    class_names = ("no", "yes")

    def __iter__(self):
        yield from (example(index) for index in range(60))
        {last}
"""


@pytest.mark.parametrize(
    ("last", "message"),
    [
        pytest.param("yield example(0)", "key '0' occurs twice", id="key twice"),
        pytest.param("yield example(60, key=7)", "key 7 of an example is not a text", id="key is a number"),
        pytest.param("yield example(60, key='')", "key '' of an example is not a text", id="empty key"),
        pytest.param(
            "yield example(60, label=2)", r"label 2 of '60' is out of range 0\.\.1", id="label too large"
        ),
        pytest.param(
            "yield example(60, label=-1)", r"label -1 of '60' is out of range 0\.\.1", id="no label"
        ),
        pytest.param(
            "yield example(60, label='yes')", "label 'yes' of '60' is not an integer", id="label is a name"
        ),
        pytest.param(
            "yield example(60, split='dev')", "split 'dev' of '60' is unknown; known: train", id="split"
        ),
        pytest.param(
            "yield example(60, image='a.png')", "image '60' is a str; expected bytes", id="image is text"
        ),
        pytest.param(
            "yield example(60, image=b'GIF')", "'60' is not an image that can be read", id="not an image"
        ),
        pytest.param(
            "yield example(60, image=Path('x'))", "'60' cannot be read: No such file", id="missing file"
        ),
        pytest.param(
            "yield example(60, image=IMAGE[:3])", "'60' has 8 x 3 pixels; at least 4 x 4", id="too small"
        ),
        pytest.param("yield example(60, image=IMAGE[:6])", "images differ in size", id="another size"),
        pytest.param("yield IMAGE, 1", "the source yields a tuple, not an Example", id="not an Example"),
        pytest.param(
            "raise KeyError('row')", r"the source failed: KeyError: 'row' \(mine.py, line 17\)", id="raises"
        ),
    ],
)
def test_examples_that_are_refused(source_module: Path, last: str, message: str) -> None:
    source_module.write_text(SOURCE.replace("{last}", last))
    with pytest.raises(SourceError, match=message):
        run("mine:Source", source_module.with_name("out"))
    assert [path.name for path in source_module.parent.iterdir() if path.name != "__pycache__"] == ["mine.py"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("Source = 3", "source 'mine:Source' is a int, not a class", id="not callable"),
        pytest.param("class Source:\n  pass", "gives a Source without class_names", id="no class names"),
        pytest.param(
            "class Source:\n  class_names = 'ab'", "gives a Source without __iter__", id="not iterable"
        ),
        pytest.param("def Source(path): ...", "cannot be made: TypeError: .*'path'", id="needs an argument"),
        pytest.param(
            "class Source(list):\n  class_names = ['a', 'b']",
            "the source is empty: it has no example",
            id="empty",
        ),
        pytest.param(
            "class Source(list):\n  class_names = ['a']", "at least 2 .* has only 'a'", id="one class"
        ),
        pytest.param("class Source(list):\n  class_names = []", "at least 2 .* has none", id="no class"),
        pytest.param(
            "class Source(list):\n  class_names = ['a', 'a']", "not unique: a, a", id="a class twice"
        ),
        pytest.param(
            "class Source(list):\n  class_names = [0, 1]", "class name 0 is not printable text", id="numbers"
        ),
        pytest.param(
            "Sauce = 1\ndef source(): ...", "mine has no 'Source', it has source", id="no such name"
        ),
    ],
)
def test_sources_that_are_refused(source_module: Path, source: str, message: str) -> None:
    source_module.write_text(source)
    with pytest.raises(SourceError, match=message):
        run("mine:Source", source_module.with_name("out"))


def test_all_examples_of_one_class_are_refused(source_module: Path) -> None:
    source_module.write_text(SOURCE.replace("index % 2", "1").replace("{last}", ""))
    with pytest.raises(SourceError, match="all 60 examples are of one class, 'yes'"):
        run("mine:Source", source_module.with_name("out"))


def test_an_empty_split_is_refused(source_module: Path) -> None:
    source_module.write_text(SOURCE.replace("range(60)", "range(2)").replace("{last}", ""))
    with pytest.raises(SourceError, match=r"validation and test \(train 2, validation 0, test 0\)"):
        run("mine:Source", source_module.with_name("out"))


@pytest.mark.parametrize("source", ["digit", "", "images:", "tfds:", ":Source"])
def test_an_unknown_source_names_the_known_ones(source: str) -> None:
    known = r"digits, tfds:NAME\[:CONFIG\], images:DIR, pkg\.module:Source"
    with pytest.raises(SourceError, match=rf"unknown source .*; known: {known}"):
        open_source(source)


def test_a_misspelt_form_names_the_known_ones() -> None:
    with pytest.raises(SourceError, match=r"no module 'image'.*; known: digits, tfds:NAME.*, images:DIR"):
        open_source("image:photos")


def test_directories_that_are_not_a_folder_per_class(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(SourceError, match=message):
            run(f"images:{tmp_path / 'images'}", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused("cannot read the directory .*: No such file or directory")
    images = write_images(tmp_path / "images", classes=["cat"])
    refused("at least 2 classes are needed, the source has only 'cat'")
    (images / "dog").mkdir()
    refused("class folder 'dog' of .* is empty")
    (images / "dog" / "notes.txt").write_text("a text")
    refused("'dog/notes.txt' is not an image that can be read")
    (images / "dog" / "notes.txt").rename(images / "notes.txt")
    refused("has 'notes.txt' beside the class folders")
    (images / "notes.txt").unlink()
    (images / "dog" / "loop").symlink_to("loop")
    refused("dog/loop is neither a file nor a folder")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_size": 3}, r"image_size must be 4\.\.4096 pixels, or 0 .*, not 3"),
        ({"image_size": 4097}, "not 4097"),
        ({"image_size": -1}, "not -1"),
        ({"image_size": 96.0}, "image_size must be a whole number, not 96.0"),
        ({"readers": 0}, "readers must be at least 1, not 0"),
        ({"shards": 0}, "shards must be at least 1, not 0"),
        ({"seed": "7"}, "seed must be a whole number, not '7'"),
        ({"readers": True}, "readers must be a whole number, not True"),
        ({"data_dir": None}, "data_dir must be text, not None"),
    ],
)
def test_settings_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        PreprocessSettings(**({"source": "digits"} | values))


def test_a_dataset_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    run("digits", tmp_path / "out", shards=16)
    run("digits", tmp_path / "out", shards=2, seed=1)
    run("digits", tmp_path / "fresh", shards=2, seed=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run("digits", tmp_path / "out")
    assert manifests.load(tmp_path / "out").source == "digits"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.txt", "holds something that is not a complete Shardline dataset"),
        ("train-00000-of-00001.tfrecord", "holds something that is not a complete Shardline dataset"),
        ("manifest.json", "holds something that is not a complete Shardline dataset"),
    ],
)
def test_a_directory_with_something_else_is_left_alone(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(SettingsError, match=message):
        run("digits", tmp_path)
    assert contents(tmp_path) == {name: b"{}"}


def test_files_beside_a_dataset_are_left_alone(tmp_path: Path) -> None:
    run("digits", tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "out")
    with pytest.raises(SettingsError, match=r"holds 'notes\.txt' beside a Shardline dataset"):
        run("digits", tmp_path / "out", seed=1)
    assert contents(tmp_path / "out") == before


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SettingsError, match="file is a file; give a directory"):
        run("digits", tmp_path / "file")
    with pytest.raises(SettingsError, match="file is a file"):
        run("digits", tmp_path / "file" / "below")
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_failure_while_writing_leaves_the_old_dataset(tmp_path: Path) -> None:
    run(f"images:{write_images(tmp_path / 'good')}", tmp_path / "out")
    before = contents(tmp_path / "out")
    bad = write_images(tmp_path / "bad")
    image = bad / "dog" / "007.png"
    image.write_bytes(image.read_bytes()[:60])  # the header is whole, so that it is found when it is decoded
    with pytest.raises(SourceError, match=r"image 'dog/007\.png' cannot be read"):
        run(f"images:{bad}", tmp_path / "out", image_size=6)
    assert contents(tmp_path / "out") == before
    with pytest.raises(SourceError, match=r"image 'dog/007\.png' cannot be read"):
        run(f"images:{bad}", tmp_path / "new", image_size=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "good", "out"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    def write() -> None:
        with directory.staging(tmp_path / "out") as staging:
            (staging / "shard").touch()
            Path("/dev/full").write_bytes(b"data")

    with pytest.raises(RunError, match=r"cannot write the dataset .*: No space left on device"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made() -> None:
    with pytest.raises(SettingsError, match=r"cannot write the dataset /proc/dataset: "):
        run("digits", Path("/proc/dataset"))


def test_the_component(tmp_path: Path) -> None:
    dataset = dsl.Dataset(uri=str(tmp_path / "dataset"))
    metrics = dsl.Metrics(uri=str(tmp_path / "metrics"))
    component.preprocess(dataset, metrics, source="digits", data_dir="", image_size=0, readers=2, seed=0)
    manifest = manifests.load(tmp_path / "dataset")
    records = {f"{name}_records": split.records for name, split in manifest.splits.items()}
    assert sum(records.values()) == 1797
    assert dataset.metadata == {"fingerprint": manifest.fingerprint, "classes": 10} | records
    assert metrics.metadata == records


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"source": "digit"}, "unknown source 'digit'"), ({"readers": 0}, "readers must be at least 1")],
)
def test_the_component_ends_with_one_line(
    tmp_path: Path, events: list[progress.Event], changes: dict[str, Any], message: str
) -> None:
    arguments = {"source": "digits", "data_dir": "", "image_size": 0, "readers": 1, "seed": 0} | changes
    with pytest.raises(SystemExit) as ended:
        component.preprocess(
            dsl.Dataset(uri=str(tmp_path / "dataset")),
            dsl.Metrics(uri=str(tmp_path / "metrics")),
            **arguments,
        )
    assert ended.value.code == ShardlineError.exit_code
    assert [(event.kind, event.topic) for event in events] == [("error", "preprocess")]
    assert message in events[0].text
    assert not (tmp_path / "dataset").exists()


def test_the_component_stands_alone() -> None:
    """KFP carries the text of the function into the container, and nothing around it."""
    code = inspect.getsource(component.preprocess)
    namespace: dict[str, Any] = {"dsl": dsl}
    exec(code, namespace)
    assert set(namespace["preprocess"].__code__.co_names) <= {
        "components.preprocess.run",
        "preprocess_artifact",
    }


def test_progress_is_reported_every_few_seconds(
    source_module: Path, events: list[progress.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.preprocess.meter._INTERVAL_SECONDS", 0.0)
    source_module.write_text(SOURCE.replace("{last}", ""))
    run("mine:Source", source_module.with_name("out"))
    steps = [event for event in events if event.kind == "progress"]
    assert steps[-1].done == steps[-1].total == 60
    assert {event.text.split(",")[0] for event in steps} == {"read", "written"}
    assert all(event.unit == "records" and event.done <= event.total for event in steps)


@pytest.mark.parametrize("source", ["digits", "images:images"])
def test_the_writing_side_loads_no_tensorflow(tmp_path: Path, source: str) -> None:
    write_images(tmp_path / "images")
    program = (
        "import sys; from pathlib import Path\n"
        "from components.preprocess.run import PreprocessSettings, preprocess\n"
        f"preprocess(PreprocessSettings(source={source!r}, image_size=6), Path('out'))\n"
        "print(sorted({'tensorflow', 'keras', 'tensorflow_datasets', 'kfp'} & set(sys.modules)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
