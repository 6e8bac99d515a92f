"""The survey: examples and sources that cannot be used, each refused in one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.components.preprocess.plan import survey
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SourceError
from tests.helpers.preprocessing import SOURCE, run


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("yield example(0)", "key '0' occurs twice"),
        ("yield example(60, key=7)", "key 7 of an example"),
        ("yield example(60, key='')", "key '' of an example"),
        ("yield example(60, label=2)", "'60': label 'label' is 2, out of range 0..1"),
        ("yield example(60, label='yes')", "'60': label 'label' is 'yes', not the index of a class"),
        ("yield example(60, split='dev')", "split 'dev' of '60'"),
        ("yield example(60, image='a.png')", "image '60' is a str"),
        (r"yield example(60, key='\ud800')", r"key '\\ud800' of an example cannot be encoded"),
        ("yield BadExample('60', 'is torn')", "'60': is torn"),
        ("yield example(60, image=IMAGE * 1.0)", "'60': not a uint8 array"),
        ("yield example(60, image=Span('gone', 0, 9))", "cannot read 'gone'"),
        ("yield example(60, features={'age': 1})", r"'60': has the features \['age'\]"),
        ("yield IMAGE, 1", "yields a tuple"),
        ("import sys; sys.exit(0)", r"the source failed: SystemExit: 0 \(mine.py, line 17\)"),
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
        ("Source = 3", "is a int, not a class"),
        ("class Source:\n  pass", "without class_names"),
        ("class Source:\n  class_names = 'ab'", "without __iter__"),
        ("class Source:\n  @property\n  def class_names(self): exit(0)", "cannot be made: SystemExit: 0"),
        ("def Source(path): ...", "cannot be made: TypeError: .*'path'"),
        ("class Source(list):\n  class_names = ['a', 'b']", "is empty"),
        ("class Source(list):\n  class_names = ['a']", "at least 2 .* has only 'a'"),
        ("class Source(list):\n  class_names = 'ab'\n  features = ('age',)", r"features hold a str"),
        (
            "from shardline import Feature\nclass Source(list):\n  class_names = 'ab'\n"
            r"  features = (Feature('\ud800', 'int64'),)",
            r"feature '\\ud800'",
        ),
        ("class Source(list):\n  class_names = ['a', 'a']", "not unique: a"),
        ("class Source(list):\n  class_names = [0, 1]", "class name 0"),
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
    with pytest.raises(SourceError, match=r"no example for test \(train 1, validation 1, test 0\)"):
        run("mine:Source", source_module.with_name("out"))
    manifest = run("mine:Source", source_module.with_name("out"), split={"train": 1.0})
    assert list(manifest.splits) == ["train"]


def test_a_key_twice_is_found_where_the_content_decides(source_module: Path) -> None:
    source_module.write_text(SOURCE.replace("{last}", "yield example(7, image=IMAGE[:6])"))
    with pytest.raises(SourceError, match="key '7' occurs twice"):
        run("mine:Source", source_module.with_name("out"), key="content", split={"train": 1.0})


@pytest.mark.parametrize(
    "feature", ["'key', 'string'", "'age', 'uint8'", "'age', 'int64', (2, 2)", r"'a\tb', 'int64'"]
)
def test_features_that_are_refused(source_module: Path, feature: str) -> None:
    features = f"features = [Feature({feature})]"
    declared = f"from shardline.trainer.manifest import Feature\n{SOURCE}\n    {features}\n"
    source_module.write_text(declared.replace("{last}", ""))
    with pytest.raises(SourceError, match=r"the source declares a feature .*; expected int64"):
        run("mine:Source", source_module.with_name("out"))


def test_progress_is_reported_every_few_seconds(
    source_module: Path, events: list[progress.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.trainer.base.progress._INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(survey, "_TOGETHER", 10)
    source_module.write_text(SOURCE.replace("{last}", ""))
    run("mine:Source", source_module.with_name("out"))
    steps = [event for event in events if event.kind == "progress"]
    assert {event.text.split(",")[0] for event in steps} == {"read", "written"}
    assert all(event.unit == "records" and event.done <= event.total for event in steps)
    assert steps[-1].done == steps[-1].total == 60
    assert "100%, 0:00" in steps[-1].text
