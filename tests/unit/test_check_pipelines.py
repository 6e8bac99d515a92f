"""Rules about everything but jobs: each finds its broken example, and not the repaired one."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.pipelines.check.checks import check
from shardline.pipelines.check.pipeline import Aim, Pipeline
from tests.helpers.checks import check_pipeline, codes, component, job, pipeline, task

KEY = "AIza" + 35 * "x"
MANY = {f"a{n}": {} for n in range(101)}


def image(name: str) -> dict[str, Any]:
    return pipeline(component(image=name))


def reading(value: Any, *, cached: bool = True, name: str = "source", **more: Any) -> dict[str, Any]:
    """A task that is given what to read."""
    inputs = {name: "STRING", **dict.fromkeys(more, "STRING")}
    only = task(parameters={name: value, **more}, cachingOptions={"enableCache": cached})
    return pipeline(component(inputs=inputs), tasks=only)


def limited(**resources: Any) -> dict[str, Any]:
    return pipeline(component(resources=resources))


def gated(condition: str) -> dict[str, Any]:
    return pipeline(tasks=task(triggerPolicy={"condition": condition}))


def retried(**policy: Any) -> dict[str, Any]:
    return pipeline(tasks=task(retryPolicy=policy))


def second(**fields: Any) -> dict[str, Any]:
    """A task "first" with the output "out", and a task "second" with the input "x" after it."""
    outputs = {"parameters": {"out": {"parameterType": "STRING"}}}
    parts = (component("first", outputs=outputs), component("second", inputs={"x": "STRING"}))
    return pipeline(*parts, tasks={**task("first"), **task("second", **fields)})


def taking(output: str, producer: str = "first") -> dict[str, Any]:
    spec = second()
    spec["root"]["dag"]["tasks"]["second"]["inputs"]["parameters"]["x"] = {
        "taskOutputParameter": {"producerTask": producer, "outputParameterKey": output}
    }
    return spec


def taking_in_a_circle() -> dict[str, Any]:
    spec = taking("out")
    spec["root"]["dag"]["tasks"]["first"]["dependentTasks"] = ["second"]
    return spec


def saying(text: str, **inputs: Any) -> dict[str, Any]:
    return pipeline(
        component(inputs=dict.fromkeys(inputs, "STRING"), args=[text]), tasks=task(parameters=inputs)
    )


def declaring(kind: str, default: Any = None, **declaration: Any) -> dict[str, Any]:
    return pipeline(parameters={"p": {"parameterType": kind, "defaultValue": default, **declaration}})


def using(accelerator: str) -> dict[str, Any]:
    return pipeline(component(resources={"accelerator": {"type": accelerator, "count": "1"}}))


ROWS = [
    ("SL123", using("nvidia.com/gpu"), using("NVIDIA_TESLA_T4")),
    ("SL126", limited(resourceCpuLimit="128"), limited(resourceCpuLimit="96", resourceMemoryLimit="624G")),
    ("SL126", limited(resourceMemoryLimit="1Ti"), limited(resourceMemoryLimit="34359738368")),
    (
        "SL126",
        limited(resourceMemoryLimit="640000M"),
        limited(resourceCpuLimit="{{$.inputs.parameters['n']}}"),
    ),
    ("SL310", saying("x" * 131_072), saying("x" * 131_071)),
    ("SL312", reading("x" * 131_072), reading("x" * 131_000)),
    (
        "SL313",
        pipeline(component(outputs={"artifacts": MANY})),
        pipeline(component(outputs={"artifacts": {"a": {}}})),
    ),
    ("SL401", image(""), image("registry/step:1")),
    ("SL403", image("registry/step"), image("registry/step:1")),
    (
        "SL403",
        image("registry/step:latest"),
        image("us-docker.pkg.dev/vertex-ai/prediction/sklearn-cpu.1-5:latest"),
    ),
    ("SL407", pipeline(component(command=["sh", "-c", "python3 -m pip install 'kfp==2.17.0'"])), pipeline()),
    ("SL410", image("registry.io/step:1"), image("step:1")),
    ("SL410", image("registry:5000/step:1"), image(f"registry:5000/step:1@sha256:{64 * 'a'}")),
    (
        "SL410",
        image("gcr.io/ml-pipeline/other:1"),
        image("gcr.io/ml-pipeline/google-cloud-pipeline-components:2.22.0"),
    ),
    ("SL501", pipeline(schemaVersion="1.0.0"), pipeline(schemaVersion="2.1.0")),
    ("SL502", pipeline(pipelineInfo={"name": "2nd-try"}), pipeline(pipelineInfo={"name": "Second try"})),
    ("SL502", pipeline(pipelineInfo={"name": None}), pipeline()),
    ("SL502", pipeline(pipelineInfo={"name": "n" * 114}), pipeline(pipelineInfo={"name": "n" * 113})),
    ("SL503", pipeline(tasks=task("other")), pipeline(tasks=task("step"))),
    ("SL503", pipeline(deploymentSpec={"executors": {"other": {}}}), pipeline()),
    ("SL503", pipeline(components={"comp-step": {}}), pipeline()),
    ("SL503", pipeline(deploymentSpec={"executors": {"exec-step": {"container": None}}}), pipeline()),
    (
        "SL504",
        second(parameters={"x": "1"}, dependentTasks=["fist"]),
        second(parameters={"x": "1"}, dependentTasks=["first"]),
    ),
    ("SL504", taking("out", "fist"), taking("out")),
    ("SL505", taking("Output"), taking("out")),
    ("SL506", second(), second(parameters={"x": "1"})),
    ("SL507", second(parameters={"x": "1", "y": "2"}), second(parameters={"x": "1"})),
    (
        "SL507",
        second(parameters={"x": "1", "pipe": "2"}),
        second(parameters={"x": "1", "cpu_limit": "{{$.inputs.parameters['pipelinechannel--cpu']}}"}),
    ),
    ("SL508", taking_in_a_circle(), taking("out")),
    ("SL509", pipeline(defaultPipelineRoot="minio://bucket"), pipeline(defaultPipelineRoot="gs://bucket")),
    ("SL511", retried(maxRetryCount="{{$.inputs.parameters['n']}}"), retried(maxRetryCount=2.0)),
    (
        "SL511",
        retried(backoffDuration="1 minute"),
        retried(backoffDuration="60s", backoffFactor=2.0, backoffMaxDuration="3600s"),
    ),
    ("SL511", retried(backoffFactor="2"), retried(backoffFactor=2)),
    (
        "SL512",
        gated("inputs.parameter_values['pipelinechannel--flip-Output'] == 'heads'"),
        gated("inputs.parameter_values['pipelinechannel--flip-Output'] == true"),
    ),
    (
        "SL512",
        gated("!('a' != inputs.parameter_values['x'])"),
        gated("int(inputs.parameter_values['x']) > 1"),
    ),
    (
        "SL512",
        gated("inputs.parameter_values['x'] == 'heads'"),
        gated("inputs.parameter_values['x'] == 'true'"),
    ),
    (
        "SL512",
        gated("'heads' == inputs.parameter_values['x']"),
        gated("'False' == inputs.parameter_values['x']"),
    ),
    ("SL513", reading("gs://bucket/data"), reading("gs://bucket/data", cached=False)),
    # A time of the run is part of the key.
    (
        "SL513",
        reading("SELECT a\nFROM t"),
        reading("SELECT a FROM t", at="{{$.pipeline_job_create_time_utc}}"),
    ),
    ("SL513", reading("-- all\nCREATE TABLE t AS SELECT a FROM b"), reading("CREATE TABLE t (a INT64)")),
    ("SL513", reading("p.d.t", name="table"), reading("p.d.t", name="module")),
    ("SL513", reading("gs://bucket/data"), reading("gs://bucket/data", data_version="3")),
    ("SL513", reading("images:gs://bucket/data"), reading("gs://bucket/model", name="output_uri")),
    ("SL513", reading("/gcs/bucket/data"), reading("digits")),
    ("SL521", saying("{{$.pipeline_job_nmae}}"), saying("{{$.pipeline_job_name}}")),
    (
        "SL521",
        saying("{{$.inputs.artifacts['a'].url}}"),
        saying("{{$.inputs.artifacts['a'].metadata['n']['m']}}"),
    ),
    (
        "SL521",
        saying("run", source="{{$.pipeline_project}}"),
        saying("run", source="{{$.pipeline_google_cloud_project_id}}"),
    ),
    (
        "SL522",
        saying("{{$.inputs.parameters['suorce']}}", source="s"),
        saying("{{$.inputs.parameters['source']}}", source="s"),
    ),
    ("SL604", declaring("NUMBER_INTEGER", "three"), declaring("NUMBER_INTEGER", 3.0)),
    ("SL604", declaring("STRING", "c", literals=["a", "b"]), declaring("STRING", "a", literals=["a", "b"])),
    ("SL605", declaring("TASK_FINAL_STATUS"), declaring("STRUCT")),
    ("SL811", declaring("STRING", KEY), declaring("STRING", "AIza")),
    ("SL811", declaring("STRING", "postgres://user:hunter2@db/x"), declaring("STRING", "postgres://db/x")),
    ("SL812", reading("-----BEGIN RSA PRIVATE KEY-----"), reading("PRIVATE KEY")),
    (
        "SL814",
        pipeline(component(env=[{"name": "API_KEY", "value": "s3cr3t"}])),
        pipeline(component(env=[{"name": "API_KEY_FILE", "value": "/secret"}])),
    ),
    ("SL814", saying(f"key = '{KEY}'"), saying("key = load()")),
]


@pytest.mark.parametrize(("code", "broken", "repaired"), ROWS, ids=[row[0] for row in ROWS])
def test_a_rule_finds_what_is_broken_and_not_what_is_right(
    code: str, broken: dict[str, Any], repaired: dict[str, Any]
) -> None:
    assert code in codes(broken)
    assert code not in codes(repaired)


RUN_ROWS: list[tuple[str, Any, Any]] = [
    ("SL601", {"p": 1, "q": 2}, {"p": 1}),
    ("SL602", {"p": "three"}, {"p": "3"}),
    ("SL603", {}, {"p": 3}),
    ("SL603", {}, None),  # nothing is known of the run yet
]


@pytest.mark.parametrize(("code", "broken", "repaired"), RUN_ROWS)
def test_the_parameters_of_a_run(code: str, broken: Any, repaired: Any) -> None:
    spec = pipeline(parameters={"p": "NUMBER_INTEGER"})

    assert code in codes(spec, parameters=broken)
    assert code not in codes(spec, parameters=repaired)


def test_the_machines_of_tasks_are_not_looked_at_where_a_run_here_gives_them_none() -> None:
    spec = using("nvidia.com/gpu")

    assert "SL123" in codes(spec, aim=Aim.HERE)  # only compiled here
    assert "SL123" not in codes(spec, aim=Aim.HERE, parameters={})


FILE_ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("SL409", {"platforms": ("kubernetes",)}, {}),
    ("SL802", {"labels": {"Team": "a"}}, {"labels": {"team": "a"}}),
]


@pytest.mark.parametrize(("code", "broken", "repaired"), FILE_ROWS)
def test_what_a_file_says_besides_the_pipeline(
    code: str, broken: dict[str, Any], repaired: dict[str, Any]
) -> None:
    assert code in {finding.code for finding in check(Pipeline(pipeline(), **broken))}
    assert code not in {finding.code for finding in check(Pipeline(pipeline(), **repaired))}


def test_a_finding_never_shows_the_secret() -> None:
    found = check_pipeline(declaring("STRING", KEY)) + check_pipeline(reading(KEY))

    assert {finding.code for finding in found} == {"SL811", "SL812"}
    assert KEY not in str(found)


def test_a_given_parameter_is_followed_down_to_the_job() -> None:
    """The pipeline's parameter reaches the worker pool, which is checked with its value."""
    machine = {"machine_type": "{{$.inputs.parameters['pipelinechannel--machine']}}"}
    pools = [{"machine_spec": machine, "replica_count": 1, "container_spec": {"image_uri": "i:1"}}]
    spec = job(*pools)
    spec["root"]["inputDefinitions"] = {"parameters": {"machine": {"parameterType": "STRING"}}}
    only = spec["root"]["dag"]["tasks"]["custom-training-job"]
    only["inputs"]["parameters"]["pipelinechannel--machine"] = {"componentInputParameter": "machine"}

    assert codes(spec) == set()
    assert codes(spec, parameters={"machine": "n1-standard-8"}) == set()
    assert codes(spec, parameters={"machine": "n1-standard-9"}) == {"SL112"}
