"""TF_CONFIG: the shapes that are read, and errors for malformed ones."""

import json

import pytest

from shardline.trainer.base.errors import ClusterError
from shardline.trainer.cluster import has_evaluator, read_cluster

CHIEF = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
WORKERS = {"worker": ["a:1", "b:1"]}
SERVED = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["p:1", "p:2"]}


def environ(cluster, kind, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "role", "num_workers", "words"),
    [
        (CHIEF, "chief", 0, "chief", 3, "chief + 2 workers"),
        (CHIEF, "worker", 0, "worker", 3, "chief + 2 workers"),  # not the chief where there is one
        (WORKERS, "worker", 0, "chief", 2, "worker 0 as chief + 1 worker"),
        (WORKERS, "worker", "1", "worker", 2, "worker 0 as chief + 1 worker"),  # as text, as some write it
        ({"chief": ["a:1"]}, "chief", 0, "chief", 1, "one process"),  # a cluster of one is none
        (SERVED, "ps", 1, "ps", 2, "chief + 1 worker + 2 parameter servers"),
        (CHIEF, "evaluator", 0, "evaluator", 1, "chief + 2 workers"),  # not in the cluster, as on Vertex AI
        ({**CHIEF, "evaluator": ["e:1"]}, "worker", 0, "worker", 3, "chief + 2 workers"),
        ({"chief": ["a:1"]}, "evaluator", 0, "evaluator", 1, "one process"),
        ({**CHIEF, "ps": [], "evaluator": []}, "chief", 0, "chief", 3, "chief + 2 workers"),
        ({"chief": [], **WORKERS}, "worker", 0.0, "chief", 2, "worker 0 as chief + 1 worker"),  # a Struct's
    ],
)
def test_reads_both_shapes(cluster, kind, index, role, num_workers, words):
    found = read_cluster(environ(cluster, kind, index))

    assert (found.role, found.is_chief, found.num_workers) == (role, role == "chief", num_workers)
    assert str(found) == words
    assert {str(read_cluster({"TF_CONFIG": none})) for none in ("", "{}", " {}\n")} == {"one process"}


@pytest.mark.parametrize(
    ("told", "words"),
    [("2 reduction servers", "chief + 1 worker"), ("", "chief + 1 worker + 2 parameter servers")],
)
def test_reduction_servers_are_no_parameter_servers(told, words):
    """On the platform both are worker pool 2, and "ps" in TF_CONFIG."""
    variables = {**environ(SERVED, "worker", 0), "SHARDLINE_ACCELERATORS": told}

    assert str(read_cluster(variables)) == words


def test_names_every_address():
    found = read_cluster(environ({**SERVED, "evaluator": ["e:1"]}, "chief", 0))

    assert found.addresses == {"chief-0": "a:1", "worker-0": "b:1", "ps-0": "p:1", "ps-1": "p:2"}
    assert found.tasks == SERVED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"cluster": {"worker": "a:1"}}', "no 'cluster' of task types with lists of hosts"),
        ('{"cluster": {}}', "neither a chief nor workers"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', "no 'task'"),
        ('{"cluster": {"boss": ["a:1"]}}', "type 'boss'"),
    ],
)
def test_names_what_is_malformed(text, message):
    with pytest.raises(ClusterError, match=message):
        read_cluster({"TF_CONFIG": text})


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "message"),
    [
        ({"chief": ["a:1", "b:1"]}, "chief", 0, "2 chiefs"),
        (CHIEF, "chief", 1, "says this is chief 1, but the only chief has index 0"),
        (WORKERS, "worker", 2, "worker:2 is not in its cluster"),
        (WORKERS, "worker", -1, "worker:-1 is not in its cluster"),
        (WORKERS, "worker", "²", "not a number"),
        ({"worker": ["a b:1", "b:1"]}, "worker", 0, "'a b:1', which is not host:port"),
        ({"worker": ["a", "b:1"]}, "worker", 0, "worker 0 is 'a', which is not host:port"),
        ({"worker": ["a:0", "b:1"]}, "worker", 0, "'a:0', which is not host:port"),
        ({"worker": [1, "b:1"]}, "worker", 0, "worker 0 is 1, which is not host:port"),
        ({"chief": ["a:1"], "worker": ["b:1", "a:1"]}, "chief", 0, "a:1 twice, as chief 0 and as worker 1"),
        ({"worker": ["a:1"], "ps": ["p:1"]}, "ps", 0, "need a chief and at least one worker"),
    ],
)
def test_names_contradictions(cluster, kind, index, message):
    with pytest.raises(ClusterError, match=message):
        read_cluster(environ(cluster, kind, index))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"cluster": {"workerpool0": ["a:1"], "workerpool3": ["b:1"]}}', True),
        ('{"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}}', False),
        ("", False),
        ("[]", False),
        ("no JSON", False),
    ],
)
def test_an_evaluator_is_known_from_cluster_spec(text, expected):
    assert has_evaluator({"CLUSTER_SPEC": text}) is expected
