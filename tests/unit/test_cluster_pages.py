"""The JobSet of docs/clusters.md: its pods find each other by their variables; no other reaches them."""

import yaml

from shardline.trainer.cluster import read_cluster
from tests.helpers.markdown import ROOT, blocks


def test_every_pod_finds_all():
    (manifest,) = blocks(ROOT / "docs" / "clusters.md", "yaml")
    jobset, policy = yaml.safe_load_all(manifest)
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
    # JobSet labels its pods with its name.
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}
    assert policy["spec"] == {
        "podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]
    }  # fmt: skip
    assert job["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    ]
