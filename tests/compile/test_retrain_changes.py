"""The compiled retraining pipeline: its steps, when they run, and what KFP's cache compares."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardline.components.changes.component import detect_changes
from shardline.pipelines import settings
from shardline.pipelines.compile import compile_pipeline
from tests.helpers.checks import check_spec

ROOT = Path(__file__).resolve().parents[2]
LOCAL = settings.load_settings(ROOT / "settings" / "local.toml")


@pytest.fixture(scope="module")
def spec():
    return yaml.safe_load((ROOT / "compiled" / "retrain.yaml").read_text())


def graph(component):
    """Returns the tasks of a DAG, each with the tasks that it waits for."""
    tasks = component["dag"]["tasks"]
    return {name: sorted(task.get("dependentTasks", [])) for name, task in tasks.items()}


def inside(spec, *names):
    """Returns the component of the last of some tasks, each inside the one before."""
    component = spec["root"]
    for name in names:
        component = spec["components"][component["dag"]["tasks"][name]["componentRef"]["name"]]
    return component


def tasks_of(spec, name):
    """Returns the tasks, wherever they stand, that run a step."""
    return [
        task
        for component in (spec["root"], *spec["components"].values())
        for key, task in component.get("dag", {}).get("tasks", {}).items()
        if key.rstrip("-0123456789") == name
    ]


@pytest.fixture(scope="module")
def in_many_tasks():
    many = replace(LOCAL, preprocess=replace(LOCAL.preprocess, tasks=3))
    return yaml.safe_load(compile_pipeline(many))


def test_the_steps_and_their_order(spec):
    assert graph(spec["root"]) == {"exit-handler-1": [], "exit-handler": ["exit-handler-1"]}
    assert graph(inside(spec, "exit-handler-1")) == {
        "detect-changes": [],
        "condition-2": ["detect-changes"],
    }
    assert graph(inside(spec, "exit-handler-1", "condition-2")) == {
        "preprocess": [],
        "rehearse": ["preprocess"],
        "train": ["preprocess", "rehearse"],
        "export-validate": ["preprocess", "train"],
        "publish": ["export-validate"],
        "record-run": ["export-validate", "publish"],
    }
    publish = inside(spec, "exit-handler-1", "condition-2", "publish")
    assert graph(publish) == {"condition-1": []}
    (blessed,) = publish["dag"]["tasks"].values()
    condition = "inputs.parameter_values['pipelinechannel--blessed'] == true"
    assert blessed["triggerPolicy"] == {"condition": condition}
    assert graph(spec["components"][blessed["componentRef"]["name"]]) == {"register": []}


def test_many_tasks_write_a_dataset_where_the_settings_say_so(in_many_tasks):
    steps = graph(inside(in_many_tasks, "exit-handler-1", "condition-2"))
    (loop,) = [name for name in steps if name.startswith("for-loop")]
    assert steps == {
        "plan-shards": [],
        loop: ["plan-shards"],
        "finish-dataset": [loop, "plan-shards"],
        "rehearse": ["finish-dataset"],
        "train": ["finish-dataset", "rehearse"],
        "export-validate": ["finish-dataset", "train"],
        "publish": ["export-validate"],
        "record-run": ["export-validate", "publish"],
    }
    (task,) = tasks_of(in_many_tasks, "plan-shards")
    assert task["inputs"]["parameters"]["tasks"] == {"runtimeValue": {"constant": 3.0}}
    assert check_spec(in_many_tasks) == []


def test_what_is_conditional_compares_booleans_and_numbers(spec):
    """kfp.local cannot evaluate a condition on a text with an apostrophe."""
    run = inside(spec, "exit-handler-1")
    (policy,) = [task["triggerPolicy"] for task in run["dag"]["tasks"].values() if "triggerPolicy" in task]
    channel = "pipelinechannel--detect-changes-changed"

    assert policy == {"condition": f"inputs.parameter_values['{channel}'] == true"}
    outputs = spec["components"]["comp-detect-changes"]["outputDefinitions"]["parameters"]
    assert outputs["changed"]["parameterType"] == "BOOLEAN"


def test_the_exit_handler_runs_however_the_run_ends(spec):
    task = spec["root"]["dag"]["tasks"]["exit-handler"]

    assert task["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert task["inputs"]["parameters"]["history_uri"] == {"componentInputParameter": "history_uri"}


def test_an_email_takes_the_place_of_the_exit_handler():
    notify = replace(LOCAL.notify, emails=("team@example.com",))
    spec = yaml.safe_load(compile_pipeline(replace(LOCAL, notify=notify)))

    (name,) = set(graph(spec["root"])) - {"exit-handler-1"}
    task = spec["root"]["dag"]["tasks"][name]
    assert name == "vertex-pipelines-notification-email"
    assert task["inputs"]["parameters"]["recipients"]["runtimeValue"] == {"constant": ["team@example.com"]}
    assert check_spec(spec) == []


def test_a_cached_dataset_is_one_of_the_same_data(spec):
    """The source string does not change when the data does; the fingerprint does."""
    (task,) = tasks_of(spec, "preprocess")

    assert task["cachingOptions"] == {"enableCache": True}
    assert task["inputs"]["parameters"]["fingerprint"] == {
        "componentInputParameter": "pipelinechannel--detect-changes-fingerprint"
    }
    assert task["inputs"]["parameters"]["source"] == {
        "componentInputParameter": "pipelinechannel--detect-changes-source"
    }


@pytest.mark.parametrize(
    "name",
    [
        "detect-changes",  # reads the history and the source
        "plan-shards",  # share a directory, which another run may be filling
        "write-shards",
        "finish-dataset",
        "export-validate",  # compares with the champion
        "register",
        "record-run",
    ],
)
def test_what_depends_on_more_than_its_inputs_is_not_cached(name, spec, in_many_tasks):
    tasks = [*tasks_of(spec, name), *tasks_of(in_many_tasks, name)]

    assert tasks
    assert not any(task.get("cachingOptions", {}).get("enableCache") for task in tasks)


def test_every_parameter_is_looked_at_but_those_without_effect_on_the_result(spec):
    parameters = set(spec["root"]["inputDefinitions"]["parameters"])
    (task,) = tasks_of(spec, "detect-changes")
    looked = {
        value["componentInputParameter"].removeprefix("pipelinechannel--")
        for value in task["inputs"]["parameters"].values()
        if "componentInputParameter" in value
    }

    assert parameters - looked == {"continue_run"}
    # Each under its own name, but for the model, which a component puts out under that name.
    names = {name for name in detect_changes.__annotations__ if name != "return"}
    assert looked - names == {"model"}
    assert names - looked == {"scheduled", "created", "readers", "model_function"}
