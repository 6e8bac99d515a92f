"""Worker pools and job in a settings file: what takes over what, and what is refused with which words."""

from pathlib import Path

import pytest

from shardline.components.custom_job import CustomJobSettings
from shardline.pipelines import settings
from shardline.trainer.base.errors import SettingsError

BASE = """
image = "i:1"
[train]
replica_count = 3
machine_type = "n1-standard-8"
accelerator_type = "NVIDIA_TESLA_T4"
accelerator_count = 1
boot_disk_size_gb = 200
env = { A = "1", B = "2" }
"""


def load(tmp_path: Path, text: str) -> CustomJobSettings:
    (tmp_path / "s.toml").write_text(text)
    return settings.load_settings(tmp_path / "s.toml").train


def test_all_pools_take_over_what_they_do_not_say(tmp_path):
    workers = '[train.workers]\nmachine_type = "n1-highmem-8"\nenv = { B = "3" }\n'
    evaluator = '[train.evaluator]\naccelerator_type = ""\naccelerator_count = 0\n'
    train = load(tmp_path, BASE + workers + evaluator)

    cluster = train.cluster
    machines = [(pool.machine_type, pool.accelerators) for pool in cluster.pools if pool]
    assert machines == [
        ("n1-standard-8", "1 NVIDIA_TESLA_T4"),
        ("n1-highmem-8", "1 NVIDIA_TESLA_T4"),
        ("n1-standard-8", ""),
    ]
    assert [pool and pool.replica_count for pool in cluster.pools] == [1, 2, None, 1]
    assert cluster.workers.env == {"A": "1", "B": "3"}
    assert cluster.chief.env == {"A": "1", "B": "2"}
    assert train.arguments["restart_job_on_worker_restart"] is True


@pytest.mark.parametrize(
    ("table", "env", "disk", "restart"),
    [
        # They run the trainer and need its variables, but no accelerators.
        ("parameter_servers", {"A": "1", "B": "2"}, 200, False),
        ("reduction_server", {}, 100, True),
    ],
)
def test_servers_have_machines_of_their_own(tmp_path, table, env, disk, restart):
    train = load(tmp_path, BASE + f'[train.{table}]\nreplica_count = 2\nmachine_type = "e2-standard-8"\n')

    servers = train.cluster.pools[2]
    assert (servers.machine_type, servers.accelerators) == ("e2-standard-8", "")
    assert (servers.replica_count, servers.env, servers.boot_disk_size_gb) == (2, env, disk)
    assert train.arguments["restart_job_on_worker_restart"] is restart


def test_the_job(tmp_path):
    job = """
[train.job]
strategy = "SPOT"
restart_job_on_worker_restart = false
extra = { reserved_ip_ranges = ["r"] }
tags = { team = "vision" }
"""
    train = load(tmp_path, BASE + job)

    assert train.arguments["restart_job_on_worker_restart"] is False
    assert train.extra == {"reserved_ip_ranges": ["r"]}
    assert (train.strategy, train.tags) == ("SPOT", {"team": "vision"})


@pytest.mark.parametrize(
    ("table", "key", "message"),
    [
        ("worker", "", "unknown key train.worker; did you mean train.workers?"),
        ("job", "timout = '5s'", "unknown key train.job.timout; did you mean train.job.timeout?"),
        ("chief", "machine = 'a'", "did you mean train.chief.machine_type?"),
        ("chief", "replica_count = 1", "train.chief.replica_count follows from train.replica_count"),
        ("job", "timeout = 5", "train.job.timeout must be text, got 5"),
        ("job", "tags = { a = 1 }", "train.job.tags.a must be text, got 1"),
        ("parameter_servers", "", "train.parameter_servers.machine_type is missing"),
        ("evaluator", "env = { A = 1 }", "train.evaluator.env.A must be text, got 1"),
    ],
)
def test_a_wrong_table_says_where_and_why(tmp_path, table, key, message):
    with pytest.raises(SettingsError, match=message) as error:
        load(tmp_path, f"{BASE}[train.{table}]\n{key}\n")
    assert str(tmp_path / "s.toml") in str(error.value)
    assert "\n" not in str(error.value)


def test_workers_that_are_not_there(tmp_path):
    with pytest.raises(SettingsError, match=r"train.workers: there are none; raise train.replica_count to 2"):
        load(tmp_path, BASE.replace("replica_count = 3", "replica_count = 1") + "[train.workers]")
