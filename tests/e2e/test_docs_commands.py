"""What the documentation tells to type is typed here, with its code and with data as it describes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import tensorflow as tf

from shardline.pipelines.check import check_run
from shardline.pipelines.spec import load_pipeline
from tests.helpers import programs
from tests.helpers.datasets import serialize
from tests.helpers.exports import publish_next, write_export
from tests.helpers.images import encoded, scene
from tests.helpers.markdown import ROOT, Command, commands, shown_files

pytestmark = pytest.mark.e2e

#: Pages that train and judge what other tests do as well.
LONG = ("gate.md", "local-runs.md", "migrating.md", "own-model.md", "strategies.md")
MARKS = dict.fromkeys(LONG, (pytest.mark.matrix,))
#: Fixtures of the pages that need more than the workspace.
NEEDS = {"gate.md": "judged"}

#: Verbs that need nothing but this machine. `run` is in other tests, and takes the longest.
HERE = ("check", "champion", "compile", "dataset", "new", "preprocess", "settings", "train", "validate")
TYPED = [
    c for c in commands() if c.whole and c.words[0] == "shardline" and c.words[1] in HERE and not c.marked
]

#: What stands for a reader's own, by verb where it depends on it.
OWN = {
    "SOURCE": "digits",
    "DATASET": "out/digits",
    "MODEL.keras": "out/trained/model.keras",
    "preprocess OUT": "out/own",
    "dataset OUT": "out/own",
    "train OUT": "out/trained",
    "validate OUT": "out/validation",
}
CHAMPIONS = "runs/champions/digits"
_SHARDLINE = Path(sys.executable).with_name("shardline")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the pages take for granted: data, code, a dataset, champions."""
    root = tmp_path_factory.mktemp("workspace")
    for name in ("compiled", "settings", "examples"):
        shutil.copytree(ROOT / name, root / name)
    example = (root / "settings" / "vertex.toml.example").read_text()
    (root / "settings" / "vertex.toml").write_text(_own(example))
    shutil.copy(root / "compiled" / "retrain.yaml", root / "anybodys.yaml")
    _write_images(root)
    _write_tables(root)
    _write_labelled(root)
    (root / "runs/champions/flowers").mkdir(parents=True)  # as a page says
    for name, text in shown_files():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_own(text))
    programs.run(
        ["python", "-c", "import runpy; runpy.run_path('leaves.py', {}, '__main__')"], cwd=root, check=True
    )
    shardline(root, "preprocess", "digits", "out/digits", "--readers", "2")
    shutil.copytree(root / "out/digits", root / "out/own")
    write_export(root / "out/champion")
    for _ in range(1 + sum("rollback" in command.words for command in TYPED)):
        publish_next(root / "out/champion", root / CHAMPIONS, accuracy=0.5)
    return root


@pytest.fixture(scope="module")
def judged(workspace: Path) -> None:
    """A model, and a champion that can be measured."""
    shutil.rmtree(workspace / "out/model", ignore_errors=True)  # of another page
    shardline(workspace, "train", "out/digits", "out/model", "--epochs", "1")
    judge = ("validate", "out/model/model.keras", "out/digits", "out/blessed", "--rule", "accuracy >= 0")
    shardline(workspace, *judge)
    publish_next(workspace / "out/blessed", workspace / CHAMPIONS, accuracy=0.5)


def shardline(root: Path, *words: str, codes: tuple[int, ...] = (0,)) -> None:
    done = programs.run([_SHARDLINE, *words], cwd=root, capture_output=True, text=True)

    assert done.returncode in codes, f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}"


def _write_images(root: Path) -> None:
    """Writes photos/, a folder per class, and scans/ with labels.csv."""
    rng = np.random.default_rng(0)
    (root / "scans").mkdir()
    rows = ["path,label"]
    for name in ("cat", "dog"):
        (root / "photos" / name).mkdir(parents=True)
        for number in range(30):
            image = encoded(scene(40 + int(rng.integers(20)), 40 + number), "PNG")
            (root / "photos" / name / f"{number}.png").write_bytes(image)
            (root / "scans" / f"{name}{number}.png").write_bytes(image)
            rows.append(f"{name}{number}.png,{name}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")


def _own(text: str) -> str:
    """Returns a file of the pages with a project and bucket of one's own in the place of the examples."""
    return text.replace("my-project", "acme-vision").replace("my-bucket", "acme-vision")


def _write_tables(root: Path) -> None:
    """Writes iris.csv, flowers.csv, old/*.tfrecord and taxi/Split-*/*.tfrecord."""
    rng = np.random.default_rng(0)
    rows = ["length,width,species"]
    for number in range(300):
        species = number % 3
        length, width = rng.normal((2.0 * species, -1.0 * species), 0.3)
        rows.append(f"{length:.3f},{width:.3f},{'abc'[species]}")
    for name in ("iris.csv", "flowers.csv"):
        (root / name).write_text("\n".join(rows) + "\n")
    (root / "old").mkdir()
    with tf.io.TFRecordWriter(str(root / "old" / "0.tfrecord")) as writer:
        for number in range(60):
            image = encoded(scene(20, 20 + number), "PNG")
            writer.write(serialize({"image/encoded": image, "image/class/label": number % 2}))
    for split in ("train", "eval"):
        folder = root / "taxi" / f"Split-{split}"
        folder.mkdir(parents=True)
        with tf.io.TFRecordWriter(str(folder / "0.tfrecord")) as writer:
            for number in range(60):
                # One feature is sometimes empty.
                trip = {"miles": [number / 7] * (number % 5 > 0), "tips": number / 3}
                writer.write(serialize({**trip, "payment": b"cash" if number % 2 else b"card"}))


def _write_labelled(root: Path) -> None:
    """Writes what has labels of other kinds than one class: tables, a table of the scans, and texts."""
    rng = np.random.default_rng(0)
    numbers = range(120)
    minutes = [float(rng.uniform(1, 90)) for _ in numbers]
    flags = [[int(rng.integers(2)) for _ in numbers] for _ in range(3)]
    kinds = ["sale" if number % 2 else "help" for number in numbers]
    tables = {
        "taxi.csv": {"distance": minutes, "fare": [3 + 2 * minute for minute in minutes]},
        "films.parquet": {
            "length": minutes,
            "genres": [["war"] * (n % 2) + ["love"] * (n % 3) for n in numbers],
        },
        "defects.csv": {"size": minutes, "crack": flags[0], "stain": flags[1], "hole": flags[2]},
        "calls.csv": {"hour": [number % 24 for number in numbers], "kind": kinds, "minutes": minutes},
        "sales.csv": {
            "zip": [f"{n:05}" for n in numbers],
            "amount": [f"{n},50" for n in numbers],
            "sold": kinds,
        },
        "reviews.csv": {
            "text": [f"a {kind} of {number}" for number, kind in enumerate(kinds)],
            "verdict": kinds,
        },
        "stars.csv": {"path": [f"good/{n}.txt" for n in numbers], "stars": minutes},
    }
    scans = sorted(path.name for path in (root / "scans").iterdir())
    tables["scans.csv"] = {
        "path": scans,
        "kind": [name[:3] for name in scans],
        "age": minutes[: len(scans)],
        "crack": flags[0][: len(scans)],
        "stain": flags[1][: len(scans)],
    }
    for name, columns in tables.items():
        write = pyarrow.parquet.write_table if name.endswith(".parquet") else pyarrow.csv.write_csv
        write(pa.table(columns), root / name)
    for folder in ("good", "bad"):
        (root / "reviews" / folder).mkdir(parents=True)
        for number in numbers:
            (root / "reviews" / folder / f"{number}.txt").write_text(f"{folder}, number {number}")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=MARKS.get(page, ())) for page in sorted({c.page.name for c in TYPED})]
)
def test_the_commands_of_a_page_do_what_it_says(
    workspace: Path, page: str, request: pytest.FixtureRequest
) -> None:
    if page in NEEDS:
        request.getfixturevalue(NEEDS[page])
    for command in TYPED:
        if command.page.name == page:
            _type(workspace, command)


def _type(root: Path, command: Command) -> None:
    verb = command.words[1]
    words = [_own(OWN.get(f"{verb} {word}", OWN.get(word, word))) for word in command.words[1:]]
    if verb in ("new", "preprocess", "train"):
        out = root / words[1 if verb == "new" else 2]
        if out.exists():
            shutil.rmtree(out)  # of another command
    if verb == "train":  # a few steps are as good as five epochs here, but for what happens at a later step
        words += ["--epochs", "1"] if "--inject" in words else ["--max-steps", "3"]
    if "--champion" in words:  # by the mkdir before it
        (root / words[words.index("--champion") + 1]).mkdir(parents=True, exist_ok=True)
    # A model that was trained for one epoch need not be blessed, but it is judged.
    shardline(root, *words, codes=(0, 1) if verb == "validate" else (0,))


def test_runs_of_the_pipeline_would_start(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of every `make run` pass all that is checked before a run."""
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "path", [str(workspace), *sys.path])
    spec = load_pipeline(workspace / "compiled" / "retrain.yaml")
    for command in commands():
        if command.words[:2] == ("make", "run"):
            given = dict(word.split("=", 1) for word in command.words[2:])
            if "tfds" not in given.get("source", ""):
                check_run(spec, given, here=True)
