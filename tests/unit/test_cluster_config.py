"""TF_CONFIG, in its two shapes and in the wrong ones."""

import json

import pytest

from trainer.distribute.cluster import read_cluster
from trainer.errors import ClusterError

CHIEF = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
WORKERS = {"worker": ["a:1", "b:1"]}


def environ(cluster, kind, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "is_chief", "words"),
    [
        (CHIEF, "chief", 0, True, "chief + 2 workers"),
        (CHIEF, "worker", 0, False, "chief + 2 workers"),  # worker 0 is not the chief where there is one
        (WORKERS, "worker", 0, True, "worker 0 as chief + 1 worker"),
        (WORKERS, "worker", 1, False, "worker 0 as chief + 1 worker"),
        (WORKERS, "worker", "1", False, "worker 0 as chief + 1 worker"),  # an index as text, as some write it
        ({"chief": ["a:1"]}, "chief", 0, True, "one process"),  # a cluster of one is none
    ],
)
def test_reads_both_shapes(cluster, kind, index, is_chief, words):
    found = read_cluster(environ(cluster, kind, index))

    assert found.is_chief is is_chief
    assert str(found) == words


@pytest.mark.parametrize("variables", [{}, {"TF_CONFIG": ""}])
def test_no_cluster_is_one_chief(variables):
    found = read_cluster(variables)

    assert found.is_chief
    assert found.num_workers == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no 'cluster'"),
        ('{"cluster": {}}', "no 'task'"),
        ('{"cluster": {"worker": []}}', "no 'cluster'"),
        ('{"cluster": {"chief": ["a", "b"]}, "task": {"type": "chief", "index": 0}}', "2 chiefs"),
        ('{"cluster": {"worker": ["a", "b"]}, "task": {"type": "worker", "index": 2}}', "not in its cluster"),
        ('{"cluster": {"worker": ["a", "b"]}, "task": {"type": "worker", "index": "x"}}', "not a number"),
        ('{"cluster": {"boss": ["a"]}, "task": {"type": "boss", "index": 0}}', "boss"),
    ],
)
def test_says_what_is_wrong(text, message):
    with pytest.raises(ClusterError, match=message):
        read_cluster({"TF_CONFIG": text})
