"""The whole way: compiled YAML, kfp.local, real launcher, fake API, local replicas, and back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from shardline.pipelines.local.localize import localize
from tests.contract import toy
from tests.contract.fake.replicas import run_replicas
from tests.contract.fake.vertex import fake_vertex
from tests.helpers.execution import execute

pytestmark = [pytest.mark.timeout(120), pytest.mark.e2e]

NOTE = 'say "hi" \\ {{ x }} \'\n\ttab, näïve ☃ 日本語 $HOME'


def test_a_compiled_pipeline_trains_through_the_api_and_gets_its_outputs_back(tmp_path: Path) -> None:
    spec = toy.compile_toy(tmp_path / "toy.yaml")
    result = tmp_path / "result.json"
    given = {"note": NOTE, "count": 3, "result": str(result)}
    text = yaml.safe_dump(localize(spec))
    assert text.count("shardline.pipelines.local.launcher_stubs") == 1
    text = text.replace("shardline.pipelines.local.launcher_stubs", "tests.contract.fake.launch")

    with fake_vertex(tmp_path, lambda job: run_replicas(job, tmp_path / "job")) as vertex:
        done = execute(tmp_path, text, given, vertex.environment)

    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(result.read_text())
    assert seen["word"] == "trained by chief"
    assert seen["metadata"]["trained_by"] == "chief"
    assert set(seen["replicas"]) == {"chief", "worker", "evaluator"}
    assert seen["replicas"]["evaluator"] == {
        "note": NOTE,
        "count": 3,
        "env": toy.SMALL.env["NOTE"],
        "text": NOTE,
        "pools": ["workerpool0", "workerpool1", "workerpool3"],
    }
    base = vertex.job.job_spec.base_output_directory.output_uri_prefix
    assert re.fullmatch(r"gs://staging/toy-[\w-]+", base)  # the run's own name, filled in
    assert vertex.job.labels == {"component": "train", "team": "vision"}
    assert [pool.replica_count for pool in vertex.job.job_spec.worker_pool_specs] == [1, 1, 0, 1]
