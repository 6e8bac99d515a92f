"""How a custom job is read from a launcher's payload."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp

from shardline.components.custom_job import ANY, whole_number
from shardline.pipelines.check import Job, Pipeline
from shardline.pipelines.check.job_rules import JOB_PARAMETERS
from shardline.pipelines.check.pipeline import UNKNOWN_TEXT, Task, fill
from shardline.pipelines.local.job import parse_payload
from shardline.trainer.base.errors import PipelineError
from tests.helpers.checks import check_spec, codes, component, job, pipeline, pool, raw_job, task

LATER = "{{$.pipeline_job_name}}"


def only_job(spec: dict[str, Any]) -> Job:
    (found,) = Pipeline(spec).jobs
    return found


def only_task(**values: Any) -> Task:
    """A task with these constants, and one input `later` that another task gives it."""
    later = {"taskOutputParameter": {"producerTask": "first", "outputParameterKey": "Output"}}
    names = dict.fromkeys([*values, "later"], "STRING") | {
        "unset": {"parameterType": "LIST", "isOptional": True}
    }
    spec = pipeline(component(inputs=names), tasks=task(parameters=values))
    spec["root"]["dag"]["tasks"]["step"]["inputs"]["parameters"]["later"] = later
    (found,) = Pipeline(spec).tasks
    return found


def p(name: str, escape: str = "") -> str:
    return f"{{{{$.inputs.parameters['{name}']{escape}}}}}"


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        # A text goes in as it is, and everything else as JSON.
        (f'{{"a": "{p("text")}"}}', '{"a": "say "hi""}'),
        (f'{{"a": "{p("text", ".json_escape[1]")}"}}', '{"a": "say \\"hi\\""}'),
        (f'{{"a": {p("number")}, "b": {p("pools")}}}', '{"a": 2, "b": [{"c": "d"}]}'),
        # Inside quotes there is text only.
        (f'{{"a": "n={p("number")} u={p("unset")}"}}', '{"a": "n=2 u="}'),
        (f'{{"a": {p("unset")}}}', '{"a": null}'),
        # What another task gives is not known yet.
        (f'{{"a": {p("later")}, "b": "{p("later")}"}}', f'{{"a": "{ANY}", "b": "{UNKNOWN_TEXT}"}}'),
        # A quote that is escaped in the template does not end its text.
        (f'{{"a": "\\"{p("later")}\\""}}', f'{{"a": "\\"{UNKNOWN_TEXT}\\""}}'),
    ],
)
def test_a_template_is_filled_as_the_platform_does(template: str, filled: str) -> None:
    assert fill(template, only_task(text='say "hi"', number=2.0, pools=[{"c": "d"}])) == filled


def test_the_job_is_what_the_launcher_sends() -> None:
    """Empty pools and zero counts are gone, as they are for the API."""
    from google_cloud_pipeline_components.container.v1.gcp_launcher.utils import json_util

    found = only_job(job(pool(), {}, pool(replica_count=0), labels={}))

    assert found.content == json_util.recursive_remove_empty(json.loads(found.payload))
    assert [(each.index, each.replica_count) for each in found.pools] == [(0, 1), (1, 1)]
    assert "labels" not in found.content
    assert len(found.written_pools) == 3


def test_a_slot_that_is_left_empty_keeps_the_roles_behind_it() -> None:
    """The API takes a pool of "0" replicas for an empty one; the launcher drops 0, and not "0"."""
    spec = job(pool(), pool(replica_count=2), {"replica_count": "0"}, pool())

    assert codes(spec) == set()
    assert [each.index for each in only_job(spec).pools] == [0, 1, 3]
    assert codes(job({"replica_count": "0"}, pool())) == {"SL101"}


def test_concat_and_if_present_are_written_out() -> None:
    """Older components of google_cloud_pipeline_components, and their tuning jobs, are built of these."""
    spec = job(pool("n1-standard-8"), extra_inputs={"wanted": "yes"})
    declared = spec["components"]["comp-custom-training-job"]["inputDefinitions"]["parameters"]
    declared["unwanted"] = {"parameterType": "STRING", "isOptional": True}
    args = spec["deploymentSpec"]["executors"]["exec-custom-training-job"]["container"]["args"]
    args[args.index("CustomJob")] = "HyperparameterTuningJob"
    parts = [
        f'{{"display_name": "{p("display_name")}"',
        {"IfPresent": {"InputName": "wanted", "Then": {"Concat": [', "a": "', p("wanted"), '"']}}},
        {"IfPresent": {"InputName": "unwanted", "Then": ', "b": 1', "Else": ', "b": 2'}},
        f', "trial_job_spec": {{"worker_pool_specs": {p("worker_pool_specs")}}}}}',
    ]
    args[args.index("--payload") + 1] = json.dumps({"Concat": parts})
    found = only_job(spec)

    assert {"display_name": "train", "a": "yes", "b": 2}.items() <= found.content.items()
    assert found.pools[0].machine_type == "n1-standard-8"


@pytest.mark.parametrize(
    ("pools", "missing"),
    [
        (ANY, set()),
        ([ANY], set()),
        ([{"machine_spec": ANY, "container_spec": {"args": [LATER]}, "replica_count": LATER}], set()),
        ([{"replica_count": 0.5}, ANY], {"SL301"}),
        ([], {"SL101"}),
    ],
)
def test_what_is_not_known_is_not_guessed_at(pools: Any, missing: set[str]) -> None:
    found = codes(raw_job(job_spec={"worker_pool_specs": pools, "scheduling": ANY}))
    assert found - {"SL521"} == missing  # no platform fills in ANY itself


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"args": ["--epochs", 5]}, r"container_spec\.args\[1\] must be a text, in quotes, got 5"),
        ({"args": [True]}, r"args\[0\] must be a text, in quotes, got True"),
        ({"args": "--epochs 5"}, r"args must be a list, got '--epochs 5'"),
        ({"command": "python3"}, r"command must be a list, got 'python3'"),
        ({"env": {"A": "b"}}, r"env must be a list, got \{'A': 'b'\}"),
        ({"args": ["--a", {"b": 1}]}, r"args\[1\] must be a text, in quotes, got \{'b': 1\}"),
        ({"args": UNKNOWN_TEXT}, r"args must be a list, got a parameter or output, as text"),
        ({"env": ["A=b"]}, r"env\[0\] must be an object, got 'A=b'"),
        ({"env": [{"name": "A", "value": 1.5}]}, r"env\[0\]\.value must be a text, in quotes, got 1\.5"),
        ({"imageUri": "i"}, r"imageUri: ContainerSpec has no such field"),
    ],
)
def test_check_and_a_local_run_refuse_what_the_launcher_s_client_refuses(
    wrong: dict[str, Any], why: str
) -> None:
    spec = raw_job(job_spec={"worker_pool_specs": [pool(container=wrong)]})

    (found,) = (finding for finding in check_spec(spec) if finding.code == "SL301")
    assert re.search(why, found.why)
    with pytest.raises(PipelineError, match=re.escape(found.why)):
        parse_payload(only_job(spec).payload, "{}")


def test_a_parameter_inside_worker_pools_is_text_and_one_of_a_wrong_type_is_refused() -> None:
    """A channel inside a list or an object arrives as text, from any type."""
    numbers = {"n": 3.0}
    args = ["--epochs", p("n"), f"{p('n')} of {p('later')}"]
    task = only_task(**numbers, pools=[{"args": args, "n": p("n")}])

    assert task.value("pools") == [{"args": ["--epochs", "3", f"3 of {UNKNOWN_TEXT}"], "n": "3"}]


@pytest.mark.parametrize("name", ["training", "labels"])  # also one that a custom job has
def test_an_object_made_of_numbers_that_come_later_is_refused(name: str) -> None:
    made = pipeline(
        component("first", outputs={"parameters": {"Output": {"parameterType": "NUMBER_INTEGER"}}}),
        component(inputs={name: "STRUCT"}),
        tasks=task("first") | task(parameters={name: {"epochs": p("pipelinechannel--first-Output")}}),
    )
    given = made["root"]["dag"]["tasks"]["step"]["inputs"]["parameters"]
    given["pipelinechannel--first-Output"] = {
        "taskOutputParameter": {"producerTask": "first", "outputParameterKey": "Output"}
    }

    assert codes(made) == {"SL521"}
    outputs = made["components"]["comp-first"]["outputDefinitions"]["parameters"]
    outputs["Output"]["parameterType"] = "STRING"
    assert codes(made) == set()


def test_a_payload_that_is_no_json_says_where() -> None:
    found = only_job(job(display_name='a "b"'))

    assert "line 1 column" in found.fault
    assert found.pools == ()


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3), (3.0, 3), ("3", 3), ("3.0", 3), (3.5, None), ("x", None), (True, None), (None, None)],
)
def test_a_whole_number_has_many_forms(value: Any, number: int | None) -> None:
    assert whole_number(value) == number


def test_the_jobs_own_parameters_are_those_of_the_component() -> None:
    assert set(CustomTrainingJobOp.component_spec.inputs) == JOB_PARAMETERS
