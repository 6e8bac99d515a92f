"""Worker pools and job in a settings file: what takes over what, and what is refused with which words."""

from pathlib import Path

import pytest

from shardline.components.vertex.job import CustomJobSettings
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
    return settings.load(tmp_path / "s.toml").train


def test_all_pools_take_over_what_they_do_not_say(tmp_path):
    workers = '[train.workers]\nmachine_type = "n1-highmem-8"\nenv = { B = "3" }\n'
    evaluator = '[train.evaluator]\naccelerator_type = ""\naccelerator_count = 0\n'
    train = load(tmp_path, BASE + workers + evaluator)

    cluster = train.cluster
    assert cluster.chief.machine == ("n1-standard-8", "NVIDIA_TESLA_T4", 1)
    assert cluster.workers.machine == ("n1-highmem-8", "NVIDIA_TESLA_T4", 1)
    assert cluster.evaluator.machine == ("n1-standard-8", "", 0)
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
    assert servers.machine == ("e2-standard-8", "", 0)
    assert (servers.replica_count, servers.env, servers.boot_disk_size_gb) == (2, env, disk)
    assert train.arguments["restart_job_on_worker_restart"] is restart


def test_the_job(tmp_path):
    job = """
[train.job]
strategy = "SPOT"
restart_job_on_worker_restart = false
reserved_ip_ranges = ["r"]
tags = { team = "vision" }
"""
    train = load(tmp_path, BASE + job)

    assert train.arguments["restart_job_on_worker_restart"] is False
    assert train.arguments["reserved_ip_ranges"] == ["r"]
    assert (train.strategy, train.tags) == ("SPOT", {"team": "vision"})


@pytest.mark.parametrize(
    ("table", "key", "message"),
    [
        ("worker", "", "unknown key train.worker; did you mean train.workers?"),
        ("job", "timout = '5s'", "unknown key train.job.timout; did you mean train.job.timeout?"),
        ("chief", "machine = 'a'", "did you mean train.chief.machine_type?"),
        ("chief", "replica_count = 1", "train.chief.replica_count follows from train.replica_count"),
        ("job", "timeout = 5", "train.job.timeout must be text, got 5"),
        ("job", "enable_web_access = 1", "train.job.enable_web_access must be true or false, got 1"),
        ("job", "tags = { a = 1 }", "train.job.tags.a must be text, got 1"),
        ("job", "reserved_ip_ranges = 'r'", "train.job.reserved_ip_ranges must be a list of texts"),
        ("job", "strategy = 'CHEAP'", "train.job.strategy is one of STANDARD, SPOT, FLEX_START"),
        ("workers", "machine_type = 'big'", "train.workers.machine_type must be a Compute Engine machine"),
        (
            "workers",
            "nfs_mounts = ['a']",
            r"train.workers.nfs_mounts\[0\] must be a mapping with server, path",
        ),
        ("workers", "nfs_mounts = [{ serve = '' }]", r"nfs_mounts\[0\].serve; did you mean .*\[0\].server"),
        ("workers", "nfs_mounts = [{ server = '' }]", r"train.workers.nfs_mounts\[0\].path is missing"),
        ("parameter_servers", "", "train.parameter_servers.machine_type is missing"),
        ("evaluator", "env = { A = 1 }", "train.evaluator.env.A must be text, got 1"),
    ],
)
def test_a_wrong_table_says_where_and_why(tmp_path, table, key, message):
    with pytest.raises(SettingsError, match=message) as error:
        load(tmp_path, f"{BASE}[train.{table}]\n{key}\n")
    assert str(tmp_path / "s.toml") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_list_where_a_table_belongs(tmp_path):
    with pytest.raises(SettingsError, match=r"train.evaluator must be a table: \[train.evaluator\]"):
        load(tmp_path, BASE + "[[train.evaluator]]")


def test_workers_that_are_not_there(tmp_path):
    with pytest.raises(SettingsError, match=r"train.workers: there are none; raise train.replica_count to 2"):
        load(tmp_path, BASE.replace("replica_count = 3", "replica_count = 1") + "[train.workers]")


FALLBACK = (
    BASE
    + """
[train.chief]
machine_type = "n1-highmem-8"
[train.job]
strategy = "SPOT"
wait = "1800s"
[[train.fallback]]
strategy = "STANDARD"
[[train.fallback]]
machine_type = "g2-standard-12"
accelerator_type = "NVIDIA_L4"
accelerator_count = 2
strategy = "FLEX_START"
wait = "60s"
[[train.fallback]]
location = "europe-west1"
cross_region = true
"""
)


def test_alternatives_take_over_what_they_do_not_say(tmp_path):
    train = load(tmp_path, FALLBACK)

    assert [(choice["name"], choice["location"], choice["wait"]) for choice in train.choices] == [
        (f"{OWN}, SPOT", "", "1800s"),
        (f"{OWN}, STANDARD", "", ""),
        ("g2-standard-12, 2 NVIDIA_L4, FLEX_START", "", "60s"),
        (f"{OWN}, SPOT, europe-west1", "europe-west1", ""),
    ]
    assert train.fallback[1].cluster.chief.boot_disk_size_gb == 200


OWN = "n1-standard-8, 1 NVIDIA_TESLA_T4"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cross_region = true", "", "train.fallback 3: .*needs cross_region = true"),
        ('"europe-west1"', '"Europe"', "train.fallback 3: .*location must be a region"),
        ('"FLEX_START"', '"FLEX"', "train.fallback 2: .*strategy is one of"),
        ('wait = "60s"', 'wait = "1 h"', "train.fallback 2: .*wait must be seconds"),
        ('wait = "60s"', "replica_count = 2", "unknown key train.fallback 2.replica_count"),
        ("[train.job]", '[train.job]\nlocation = "europe-west1"', "unknown key train.job.location"),
        (
            "[train.job]",
            '[train.job]\npsc_interface_config = {network_attachment = "a"}',
            "3: .*location: psc_interface_config",
        ),
        ("[train.job]", '[train.job]\ntensorboard = "projects/p/locations/l/tensorboards/1"', "tensorboard"),
        ("[[train.fallback]]", "[train.fallback]", "train.fallback must be tables"),
    ],
)
def test_an_alternative_that_cannot_be_is_refused(tmp_path, old, new, message):
    text = FALLBACK.replace(old, new, 1)
    if new == "[train.fallback]":
        text = BASE + "[train.fallback]\nstrategy = 'SPOT'\n"
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, text)


def test_a_wait_needs_something_to_try_next(tmp_path):
    with pytest.raises(SettingsError, match=r"train\.job\.wait"):
        load(tmp_path, BASE + '[train.job]\nwait = "60s"\n')


def test_a_network_is_global_and_goes_with_another_region(tmp_path):
    network = "projects/1/global/networks/n"
    train = load(tmp_path, FALLBACK.replace("[train.job]", f'[train.job]\nnetwork = "{network}"'))
    assert [job.network for job in train.fallback] == [network] * 3


def test_the_image_has_cuda_where_only_an_alternative_has_gpus(tmp_path):
    table = '[[train.fallback]]\naccelerator_type = ""\naccelerator_count = 0\n'
    own = BASE.replace('accelerator_type = "NVIDIA_TESLA_T4"\naccelerator_count = 1\n', "")
    swapped = '[[train.fallback]]\naccelerator_type = "NVIDIA_TESLA_T4"\naccelerator_count = 1\n'
    for text, first in ((BASE + table, "train.chief"), (own + swapped, "train.fallback 1.chief")):
        (tmp_path / "s.toml").write_text(text)
        found = settings.load(tmp_path / "s.toml").accelerators
        assert next(key for key, value in found.items() if value) == first
