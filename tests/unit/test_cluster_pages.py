"""The JobSet of docs/clusters.md: its pods have variables by which the program finds all of them."""

import yaml

from shardline.trainer.cluster.cluster import read_cluster
from tests.helpers.markdown import ROOT, blocks


def test_every_pod_finds_all():
    (manifest,) = blocks(ROOT / "docs" / "clusters.md", "yaml")
    jobset = yaml.safe_load(manifest)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], jobset["metadata"]["name"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    pods = [f"{name}-{replicated['name']}-0-{index}" for index in range(job["completions"])]
    clusters = [
        read_cluster({**variables, "HOSTNAME": pod, "JOB_COMPLETION_INDEX": str(index)})
        for index, pod in enumerate(pods)
    ]

    assert job["parallelism"] == job["completions"]
    assert {cluster.hosts for cluster in clusters} == {tuple(f"{pod}.{name}:10000" for pod in pods)}
    assert [cluster.task_index for cluster in clusters] == list(range(len(pods)))
    assert job["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    ]
