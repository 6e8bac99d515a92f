"""Lines of replicas in the output of a pipeline."""

from __future__ import annotations

from pipelines.local.replica_lines import ReplicaLines


def test_what_replicas_print_is_found_and_what_kfp_prints_is_not() -> None:
    lines = [
        ("preprocess: 3 records", None),
        ("boss-0 | hello", None),
        ("chief-0 | hello", ("chief-0", "hello")),
        ("chief-0 | [KFP Executor 2026-11-20 15:41:45,936 INFO]: Got executor_input:", None),
        ("chief-0 | {", None),
        ('chief-0 |     "inputs": {', None),
        ("worker-12 |   indented", ("worker-12", "  indented")),  # another replica
        ("chief-0 | }", None),
        ("chief-0 | Traceback (most recent call last):", ("chief-0", "Traceback (most recent call last):")),
        ("chief-0 |   File x", ("chief-0", "  File x")),
        ("evaluator-0 | ", ("evaluator-0", "")),
    ]
    found = ReplicaLines()
    assert [found.find(line) for line, _ in lines] == [expected for _, expected in lines]
