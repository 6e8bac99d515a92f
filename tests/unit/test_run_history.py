"""Runs are listed, set side by side, and continued after a failure: what their directories tell."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardline.components.runs import RunDirectory
from shardline.pipelines.cli.main import main
from shardline.pipelines.local import failed_run, with_checkpoints
from shardline.trainer.base import progress
from shardline.trainer.base.errors import PipelineError, SettingsError

ROOT = Path(__file__).parents[2]
PIPELINE = b"pipelineInfo: {name: retrain}\n"


def write_run(runs: Path, name: str, **facts: Any) -> Path:
    """Writes the directory of a failed run of the retraining pipeline, or of what the facts say."""
    directory = runs / name
    directory.mkdir(parents=True)
    yaml = runs.parent / "retrain.yaml"
    yaml.write_bytes(PIPELINE)
    content = {
        "pipeline": "retrain",
        "state": "failed",
        "created": f"2026-01-0{name[-1]}T06:00:00Z",
        "duration_s": 61.5,
        "yaml": str(yaml),
        "sha256": hashlib.sha256(PIPELINE).hexdigest(),
        "parameters": {"epochs": 3, "train_options": {}},
    }
    (directory / "run.json").write_text(json.dumps(content | facts))
    (directory / "run.log").touch()
    return directory


def shardline(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def two(runs: Path) -> Path:
    """A failed run, and one that succeeded."""
    why = {"failed": "train, replica chief-0", **dict.fromkeys(("exit", "error", "cause", "next_step"), "")}
    write_run(runs, "run-1", explanation={**why, "lines": []})
    succeeded = {"state": "succeeded", "verdict": "blessed", "metrics": {"accuracy": 0.9, "f1": 0.8}}
    write_run(
        runs, "run-2", **succeeded, parameters={"epochs": 6, "train_options": {"grace_period": 5}, "seed": 0}
    )
    (runs / "latest").symlink_to("run-2")
    return runs


def test_runs_are_listed_newest_first_and_the_link_is_no_run(two: Path) -> None:
    (two / "run-3").mkdir()
    (two / "run-3" / "run.json").write_text("damaged")

    lines = shardline("status", "--runs-dir", two).stdout.splitlines()

    assert [line.split()[:4] for line in lines] == [
        ["RUN", "WHERE", "PIPELINE", "STATE"],
        ["run-2", "here", "retrain", "succeeded"],
        ["run-1", "here", "retrain", "failed"],
    ]
    assert lines[1].endswith("1 min 02 s  blessed, accuracy 0.9000")
    assert lines[2].endswith("train, replica chief-0")
    listed = json.loads(shardline("status", "--runs-dir", two, "--json", "--limit", 1).stdout)["runs"]
    assert [item["run"] for item in listed] == ["run-2"]


def test_a_failed_run_is_continued_with_its_pipeline_and_its_checkpoints(runs: Path) -> None:
    directory = write_run(runs, "run-1")
    places = [
        directory / "outputs" / "retrain-1" / "train" / name / "checkpoints" for name in ("old", "model")
    ]
    for place, step in zip(places, (46, 92), strict=True):
        place.mkdir(parents=True)
        (place / f"ckpt-{step}.index").touch()
        os.utime(place / f"ckpt-{step}.index", (step, step))

    failed = failed_run(RunDirectory.find("run-1", runs))

    given = {"train_options": {"grace_period": 5}}
    assert with_checkpoints(failed, given) == {**given, "continue_run": str(places[1])}


@pytest.mark.parametrize(
    ("recorded", "given", "own", "expected"),
    [
        ("", {"checkpoint_dir": "X"}, True, ""),  # in which training goes on by itself
        ("A", {"checkpoint_dir": "A"}, False, ""),
        ("A", {}, False, "A"),  # whose other options are replaced
        ("", {}, True, "own"),
        ("", {}, False, None),
    ],
)
@pytest.mark.parametrize("start", ["", "dir/of-another"])
def test_a_continued_run_is_continued_from_the_same_place(
    runs: Path, recorded: str, given: dict[str, str], own: bool, expected: str | None, start: str
) -> None:
    """Its own checkpoints win over what it began from; continue_run stays where there is nothing else."""
    parameters = {"train_options": {"checkpoint_dir": recorded}, "continue_run": start}
    directory = write_run(runs, "run-2", parameters=parameters)
    place = directory / "outputs" / "retrain-1" / "train" / "checkpoints"
    if own:
        place.mkdir(parents=True)
        (place / "ckpt-1.index").touch()

    found = with_checkpoints(failed_run(RunDirectory(directory)), {**parameters, "train_options": given})

    assert found["train_options"] == given
    assert found["continue_run"] == {None: start, "own": str(place)}.get(expected, expected)


def test_a_start_that_is_given_stays(runs: Path) -> None:
    recorded = {"train_options": {"checkpoint_dir": "A"}, "continue_run": ""}
    failed = failed_run(RunDirectory(write_run(runs, "run-2", parameters=recorded)))
    given = {"train_options": {}, "continue_run": "dir/of-another"}

    assert with_checkpoints(failed, given) == given
    events: list[progress.Event] = []
    with progress.sink(events.append):
        anew = with_checkpoints(failed_run(RunDirectory(write_run(runs, "run-1"))), {"epochs": 3})
    assert anew == {"epochs": 3, "continue_run": ""}
    assert events[-1].text == "continues run-1; it has no checkpoints: training starts from the beginning"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"state": "running"}, "run-1 is still running; 'shardline logs "),
        ({"state": "succeeded"}, "run-1 has succeeded: there is nothing to continue"),
        ({"pipeline": "tune"}, "only runs of 'retrain' can be continued"),
    ],
)
def test_what_cannot_be_continued(runs: Path, facts: dict[str, str], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        failed_run(RunDirectory(write_run(runs, "run-1", **facts)))
    with pytest.raises(SettingsError, match="there is no run 'run-9', neither as a directory nor in"):
        RunDirectory.find("run-9", runs)


@pytest.mark.parametrize("given", [False, True])
def test_a_run_is_continued_with_the_copy_of_its_pipeline_or_the_one_given(
    runs: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    compiled = ROOT / "compiled" / "retrain.yaml"
    copy = write_run(runs, "run-1", parameters={"epochs": 3}) / "pipeline.yaml"
    copy.write_bytes(compiled.read_bytes())
    ran: list[tuple[Path, Any]] = []
    monkeypatch.setattr(
        "shardline.pipelines.local.run.run_pipeline", lambda path, values, **_: ran.append((path, values))
    )
    done = shardline("run", *([compiled] if given else []), "--resume", "run-1", "--runs-dir", runs)

    assert done.exit_code == 0, done.output
    ((path, values),) = ran
    assert path == (compiled if given else copy)
    assert values["epochs"] == 3


@pytest.mark.parametrize("absent", ["psutil", "tensorflow"])
def test_a_run_without_the_extra_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find(name))

    result = shardline("run", ROOT / "compiled" / "retrain.yaml", "--runs-dir", tmp_path / "runs")

    assert (result.exit_code, result.stdout) == (2, "")
    words = f"a local run needs {absent}, which is not installed: pip install 'shardline[local]'"
    assert result.stderr == f"Error: {words}\n"
    assert not (tmp_path / "runs").exists()
