"""The compiled retraining pipeline: its steps, when they run, and what KFP's cache compares."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardline.components.configure.component import configure
from shardline.pipelines import settings
from shardline.pipelines.compile import compile_pipeline
from tests.helpers.checks import check_pipeline

ROOT = Path(__file__).resolve().parents[2]
LOCAL = settings.load(ROOT / "settings" / "local.toml")


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


def titled(spec, component, title):
    """Returns the component of the task that has a title."""
    (found,) = [
        task for task in component["dag"]["tasks"].values() if task.get("taskInfo", {}).get("name") == title
    ]
    return spec["components"][found["componentRef"]["name"]]


def tasks_of(spec, name):
    """Returns the tasks, wherever they stand, that run a step."""
    return [
        task
        for component in (spec["root"], *spec["components"].values())
        for key, task in component.get("dag", {}).get("tasks", {}).items()
        if key.rstrip("-0123456789") == name
    ]


def test_the_steps_and_their_order(spec):
    """One task preprocesses unless more are asked for; what follows is the same pipeline."""
    assert graph(spec["root"]) == {"exit-handler-1": [], "conclude": ["exit-handler-1"]}
    run = inside(spec, "exit-handler-1")
    (changed,) = set(graph(run)) - {"configure"}
    assert graph(run) == {"configure": [], changed: ["configure"]}
    (branches,) = graph(inside(spec, "exit-handler-1", changed))
    both = inside(spec, "exit-handler-1", changed, branches)
    one, many = (titled(spec, both, title) for title in ("one-task", "many-tasks"))
    assert graph(one) == {
        "preprocess": [],
        "rehearse": ["preprocess"],
        "train-and-register": ["preprocess", "rehearse"],
        "record-run": ["train-and-register"],
    }
    (loop,) = [name for name in graph(many) if name.startswith("for-loop")]
    assert graph(many) == {
        "plan-shards": [],
        loop: ["plan-shards"],
        "finish-dataset": [loop, "plan-shards"],
        "rehearse-2": ["finish-dataset"],
        "train-and-register-2": ["finish-dataset", "rehearse-2"],
        "record-run-2": ["train-and-register-2"],
    }
    follow_up = titled(spec, one, "train-and-register")
    assert graph(follow_up) == {"train": [], "export-validate": ["train"], "condition-1": ["export-validate"]}
    assert graph(titled(spec, follow_up, "blessed")) == {"register": []}


def test_what_is_conditional_compares_booleans_and_numbers(spec):
    """kfp.local cannot evaluate a condition on a text with an apostrophe."""
    run = inside(spec, "exit-handler-1")
    (policy,) = [task["triggerPolicy"] for task in run["dag"]["tasks"].values() if "triggerPolicy" in task]
    channel = "pipelinechannel--configure-changed"

    assert policy == {"condition": f"inputs.parameter_values['{channel}'] == true"}
    outputs = spec["components"]["comp-configure"]["outputDefinitions"]["parameters"]
    assert outputs["changed"]["parameterType"] == "BOOLEAN"


def test_the_conclusion_comes_however_the_run_ends(spec):
    task = spec["root"]["dag"]["tasks"]["conclude"]

    assert task["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert task["inputs"]["parameters"]["history_uri"] == {"componentInputParameter": "history_uri"}


def test_an_email_takes_the_place_of_the_conclusion():
    notify = replace(LOCAL.notify, emails=("team@example.com",))
    spec = yaml.safe_load(compile_pipeline(replace(LOCAL, notify=notify)))

    (name,) = set(graph(spec["root"])) - {"exit-handler-1"}
    task = spec["root"]["dag"]["tasks"][name]
    assert name == "vertex-pipelines-notification-email"
    assert task["inputs"]["parameters"]["recipients"]["runtimeValue"] == {"constant": ["team@example.com"]}
    assert check_pipeline(spec) == []


def test_a_cached_dataset_is_one_of_the_same_data(spec):
    """The source string does not change when the data does; the fingerprint does."""
    (task,) = tasks_of(spec, "preprocess")

    assert task["cachingOptions"] == {"enableCache": True}
    assert task["inputs"]["parameters"]["fingerprint"] == {
        "componentInputParameter": "pipelinechannel--configure-fingerprint"
    }
    assert task["inputs"]["parameters"]["data"] == {
        "componentInputParameter": "pipelinechannel--configure-data"
    }


@pytest.mark.parametrize(
    "name",
    [
        "configure",  # reads the history and the source
        "plan-shards",  # share a directory, which another run may be filling
        "write-shards",
        "finish-dataset",
        "export-validate",  # compares with the champion
        "register",
        "record-run",
    ],
)
def test_what_depends_on_more_than_its_inputs_is_not_cached(name, spec):
    tasks = tasks_of(spec, name)

    assert tasks
    assert not any(task.get("cachingOptions", {}).get("enableCache") for task in tasks)


def test_every_parameter_is_looked_at_but_those_without_effect_on_the_result(spec):
    parameters = set(spec["root"]["inputDefinitions"]["parameters"])
    (task,) = tasks_of(spec, "configure")
    looked = {
        value["componentInputParameter"].removeprefix("pipelinechannel--")
        for value in task["inputs"]["parameters"].values()
        if "componentInputParameter" in value
    }

    assert parameters - looked == {"continue_run", "preprocess_processes", "preprocess_tasks"}
    # Each under its own name.
    names = {name for name in configure.__annotations__ if name != "return"}
    assert looked <= names
    assert names - looked == {"scheduled", "created", "readers"}
