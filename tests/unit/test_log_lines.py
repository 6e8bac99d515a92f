"""Lines of a log that say something, told from KFP's own."""

from __future__ import annotations

from shardline.components.runs.causes import readable, split_replica


def test_what_processes_print_is_kept_and_what_kfp_prints_is_not() -> None:
    lines = [
        ("preprocess: 3 records", True),
        ("boss-0 | hello", True),  # no replica: a line as any other
        ("chief-0 | hello", True),
        ("chief-0 | [KFP Executor 2026-11-20 15:41:45,936 INFO]: Got executor_input:", False),
        ("chief-0 | {", False),
        ('chief-0 |     "inputs": {', False),
        ("worker-12 |   indented", True),  # another replica
        ("chief-0 | }", False),
        ("chief-0 | Traceback (most recent call last):", True),
        ("chief-0 |   File x", True),
        ("evaluator-0 | ", False),
        ("[KFP Executor 2026-11-20 15:41:46,012 INFO]: Got executor_input:", False),
        ("{", False),
        ("Killed", True),
    ]
    assert list(readable(line for line, _ in lines)) == [line for line, kept in lines if kept]


def test_a_replica_is_split_from_its_line() -> None:
    assert split_replica("worker-12 |   x | y") == ("worker-12", "  x | y")
    assert split_replica("boss-0 | x") == ("", "boss-0 | x")
