"""localize() changes what must change, and nothing else; what cannot run here is said before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.pipelines.local.job import EXECUTOR_INPUT_MARKER
from shardline.pipelines.local.localize import check_runnable, localize, localize_value, preloaded_modules
from shardline.pipelines.spec import load_pipeline
from shardline.trainer.base.errors import PipelineError
from tests.helpers.third_party_pipeline import IMAGE, elsewhere, third_party, write_pipeline
from tests.helpers.toy_pipeline import write_toy

Path_ = tuple[Any, ...]
_ABSENT = "<absent>"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return load_pipeline(write_toy(tmp_path_factory.mktemp("toy") / "toy.yaml"))


def _differences(old: Any, new: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any, Any]]:
    """All places at which two JSON values differ; lists of different lengths differ as a whole."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), (*path, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences(*pair, (*path, index))
    elif old != new or type(old) is not type(new):
        yield path, old, new


def test_only_the_named_places_differ(toy: dict[str, Any]) -> None:
    before = copy.deepcopy(toy)
    differences = {path: (old, new) for path, old, new in _differences(toy, localize(toy))}
    assert toy == before

    launcher = ["python3", "-u", "-m", "google_cloud_pipeline_components.container.v1.custom_job.launcher"]
    old, new = differences.pop(("deploymentSpec", "executors", "exec-train", "container", "command"))
    assert old == launcher
    assert new[:5] == ["python3", "-u", "-m", "shardline.pipelines.local.launcher_stubs", "CustomJob"]

    train = ("components", "comp-train", "inputDefinitions", "parameters")
    specs = (*train, "worker_pool_specs", "defaultValue")
    for pool in (0, 1):
        place = (*specs, pool, "container_spec", "args", 1)
        assert differences.pop(place) == ("{{$.json_escape[1]}}", EXECUTOR_INPUT_MARKER)
    assert differences.pop((*train, "project", "defaultValue"))[1] == "local-project"
    assert differences.pop((*train, "location", "defaultValue"))[1] == "local"
    assert differences.pop((*train, "persistent_resource_id", "defaultValue"))[1] == ""

    # A condition on a task's output, by name, in the form that kfp.local can resolve.
    place = ("root", "dag", "tasks", "condition-1", "triggerPolicy", "condition")
    old, new = differences.pop(place)
    assert old == "inputs.parameter_values['pipelinechannel--judge-blessed'] == true"
    assert new == "inputs.parameter_values['pipelinechannel--judge--blessed'] == true"

    # The optional parameter that nobody has set.
    root = ("root", "inputDefinitions", "parameters", "greeting", "defaultValue")
    assert differences.pop(root) == (_ABSENT, None)
    assert differences == {}


def test_a_task_waits_for_what_it_takes_though_no_compiler_has_said_so(toy: dict[str, Any]) -> None:
    spec = copy.deepcopy(toy)
    tasks = spec["root"]["dag"]["tasks"]
    said = {name: tasks[name].pop("dependentTasks") for name in tasks if "dependentTasks" in tasks[name]}
    assert said
    spec["deploymentSpec"]["executors"]["exec-unused"] = {"container": None}  # which runs nothing

    local = localize(spec)["root"]["dag"]["tasks"]
    assert {name: local[name]["dependentTasks"] for name in said} == said


def test_a_task_is_tried_again_as_it_says_but_for_a_custom_job_and_shardline_s_own(
    toy: dict[str, Any],
) -> None:
    spec = copy.deepcopy(toy)
    policy = {"maxRetryCount": 2, "backoffDuration": "60s"}
    for name in ("prepare", "train", "judge"):
        spec["root"]["dag"]["tasks"][name]["retryPolicy"] = policy
    source = "from shardline.components.preprocess.run import run"
    spec["deploymentSpec"]["executors"]["exec-judge"]["container"]["command"][-1] = source

    local = localize(spec)["root"]["dag"]["tasks"]
    assert local["prepare"]["retryPolicy"] == policy
    assert local["train"]["retryPolicy"] == {**policy, "backoffDuration": "0s"}
    assert "retryPolicy" not in local["judge"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{$.pipeline_google_cloud_project_id}}/x", "local-project/x"),
        ("{{$.pipeline_service_account}}", ""),
        ("{{$.pipeline_job_create_time_utc}}", "2025-01-02T03:04:05Z"),
        ("{{$.pipeline_job_schedule_time_utc}}", "2025-01-02T03:04:05Z"),
        # kfp.local resolves these itself.
        ("{{$}}", "{{$}}"),
        ("{{$.inputs.parameters['a']}}", "{{$.inputs.parameters['a']}}"),
        ("{{$.outputs.artifacts['m'].path}}", "{{$.outputs.artifacts['m'].path}}"),
        (
            "{{$.pipeline_task_name}} {{$.pipeline_job_uuid}}",
            "{{$.pipeline_task_name}} {{$.pipeline_job_uuid}}",
        ),
        # Braces that are nobody's placeholder.
        ("{{ jinja }} {$.x} {{}}", "{{ jinja }} {$.x} {{}}"),
    ],
)
def test_placeholders(text: str, expected: str) -> None:
    assert localize_value({"a": [text]}, created="2025-01-02T03:04:05Z") == {"a": [expected]}


@pytest.mark.parametrize("text", ["{{$.no_such_thing}}", "{{$.inputs.parameters['a'].json_escape[0]}}"])
def test_a_placeholder_without_meaning_here_is_refused(text: str) -> None:
    with pytest.raises(PipelineError, match="cannot be resolved on this machine"):
        localize_value(text)


def test_the_command_of_a_container_component_becomes_a_process(toy: dict[str, Any]) -> None:
    spec = copy.deepcopy(toy)
    container = {"image": "alpine", "command": ["echo"], "args": ["{{$.inputs.parameters['a']}}"]}
    spec["deploymentSpec"]["executors"]["exec-judge"]["container"] = container

    local = localize(spec)["deploymentSpec"]["executors"]["exec-judge"]["container"]

    stub = ["shardline.pipelines.local.launcher_stubs", "Container"]
    marker = "--marker=kfp.dsl.executor_main"
    assert local["command"] == ["python3", "-u", "-m", *stub, marker, "{{$}}", "echo"]
    assert local["args"] == container["args"]


@pytest.mark.parametrize("name", ["../../x", "..", "", "a\0b", "x" * 200])
def test_a_name_that_leads_out_of_the_run_directory_is_refused(toy: dict[str, Any], name: str) -> None:
    tasks = copy.deepcopy(toy)
    tasks["root"]["dag"]["tasks"][name] = tasks["root"]["dag"]["tasks"].pop("prepare")
    outputs = copy.deepcopy(toy)
    outputs["components"]["comp-prepare"]["outputDefinitions"]["artifacts"][name] = {}

    for spec, what in ((tasks, "task"), (outputs, "output")):
        with pytest.raises(PipelineError, match=f"the name of the {what} .* cannot be a file name"):
            localize(spec)


def test_all_that_cannot_run_here_is_said_at_once(tmp_path: Path) -> None:
    check_runnable(load_pipeline(write_pipeline(third_party, tmp_path / "third_party.yaml")))
    spec = load_pipeline(write_pipeline(elsewhere, tmp_path / "p.yaml"))

    with pytest.raises(PipelineError) as caught:
        check_runnable(spec)

    words, _, reasons = str(caught.value).partition(": ")
    assert words == "the pipeline cannot run here"
    assert sorted(reasons.split("; ")) == [
        f"task baked has its code in the image {IMAGE} only",
        "task bigquery-query-job calls the platform through a launcher of Google's that has no stub here",
        f"task entrypoint runs the entry point of the image {IMAGE}, which is not known here",
        f"task program runs somebodys-trainer of the image {IMAGE}, which is not on this machine",
        "task unmet needs no-such-package==1, numpy<1: pip install it first",
    ]


def test_the_modules_that_tasks_import_are_found() -> None:
    compiled = load_pipeline(Path(__file__).parents[2] / "compiled" / "retrain.yaml")
    names = {name.rpartition(".")[2] for name in preloaded_modules(localize(compiled))}
    assert names >= {"rehearsal", "validation", "train"}
    assert preloaded_modules({"deploymentSpec": {"executors": {"exec-x": {"importer": {}}}}}) == []
