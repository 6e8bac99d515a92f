"""Placeholders in compiled pipelines: stock kfp.local fills in few, and some backends none in a default."""

from __future__ import annotations

import pytest
from kfp import dsl

from shardline import components
from shardline.pipelines.spec import OWN_PIPELINES, all_tasks, load_pipeline
from tests.helpers.markdown import ROOT


@pytest.mark.parametrize("name", [*components._FOLDERS])
def test_stock_kfp_local_fills_in_the_defaults_of_a_component(name: str) -> None:
    inputs = getattr(components, name).component_spec.inputs

    placeholders = {each.default for each in inputs.values() if "{{$" in str(each.default)}

    assert placeholders <= {dsl.PIPELINE_JOB_NAME_PLACEHOLDER}


@pytest.mark.parametrize("name", OWN_PIPELINES)
def test_a_task_of_our_pipelines_is_given_the_name_of_the_run(name: str) -> None:
    spec = load_pipeline(ROOT / "compiled" / f"{name}.yaml")
    declared = {key: component.get("inputDefinitions", {}) for key, component in spec["components"].items()}

    for task, content in all_tasks(spec):
        if "job_name" in declared[content["componentRef"]["name"]].get("parameters", {}):
            assert "job_name" in content["inputs"]["parameters"], task
