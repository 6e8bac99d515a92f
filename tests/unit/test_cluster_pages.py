"""Manifests of the pages: their pods have variables by which the program finds all of them."""

import pytest
import yaml

from shardline.trainer.cluster.cluster import read_cluster
from tests.helpers.markdown import ROOT, blocks

INDEXED, JOBSET = ([*yaml.safe_load_all(text)] for text in blocks(ROOT / "docs" / "kubernetes.md", "yaml"))


def pods(job, prefix, subdomain):
    (container,) = job["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    for index in range(job["completions"]):
        name = f"{prefix}-{index}"
        yield f"{name}.{subdomain}", {**variables, "HOSTNAME": name, "JOB_COMPLETION_INDEX": str(index)}


def indexed_pods():
    service, job = INDEXED
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    return job["spec"], [*pods(job["spec"], job["metadata"]["name"], service["metadata"]["name"])]


def jobset_pods():
    (jobset,) = JOBSET
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], jobset["metadata"]["name"]
    return job, [*pods(job, f"{name}-{replicated['name']}-0", name)]


@pytest.mark.parametrize("manifest", [indexed_pods, jobset_pods])
def test_every_pod_finds_all(manifest):
    job, found = manifest()
    clusters = [read_cluster(variables) for _, variables in found]

    assert job["parallelism"] == job["completions"] == len(found)
    assert {cluster.hosts for cluster in clusters} == {tuple(f"{host}:10000" for host, _ in found)}
    assert [cluster.task_index for cluster in clusters] == list(range(len(found)))
    assert {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}} in job["podFailurePolicy"][
        "rules"
    ]


def test_the_task_of_skypilot_is_yaml():
    (text,) = blocks(ROOT / "docs" / "clusters.md", "yaml")

    assert yaml.safe_load(text)["num_nodes"] == 4
