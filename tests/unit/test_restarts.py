"""How often replicas and jobs start again."""

from __future__ import annotations

from shardline.pipelines.local.supervisor import RestartLimits, Restarts


def test_each_replica_has_its_own_limit_and_the_job_another() -> None:
    restarts = Restarts(RestartLimits(replica=2, job=1), whole_job=False)
    assert restarts.after_failure("a") == ("replica", "restart 1 of 2")
    assert restarts.after_failure("a") == ("replica", "restart 2 of 2")
    assert restarts.after_failure("b") == ("replica", "restart 1 of 2")
    assert restarts.after_failure("a") == ("job", "restart 1 of 1")
    assert restarts.after_failure("a") is None


def test_a_whole_job_has_one_limit() -> None:
    restarts = Restarts(RestartLimits(job=2), whole_job=True)
    assert restarts.after_failure("a") == ("job", "restart 1 of 2")
    assert restarts.after_failure("b") == ("job", "restart 2 of 2")
    assert restarts.after_failure("c") is None


def test_preemptions_are_counted_apart() -> None:
    restarts = Restarts(RestartLimits(preemption=2, job=0), whole_job=True)
    assert restarts.after_preemption() == ("job", "preemption 1 of 2")
    assert restarts.after_failure("a") is None
    assert restarts.after_preemption() == ("job", "preemption 2 of 2")
    assert restarts.after_preemption() is None
    assert Restarts(RestartLimits(), whole_job=False).after_preemption() == ("replica", "preemption 1 of 6")
