"""The cost of a run before it is submitted, and the table of list prices that it is made from."""

from __future__ import annotations

import csv
import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardline.components.runs.record import RunRecord
from shardline.pipelines.remote.cost import TABLE, estimate
from shardline.pipelines.settings import load
from shardline.pipelines.spec import load_pipeline
from shardline.trainer.base.errors import SettingsError
from tests.helpers.fake_storage import fake_storage

TUNE = Path(__file__).parents[2] / "compiled" / "tune.yaml"

#: Exact in binary: a vCPU 0.5, on Spot 0.25, an accelerator 2, a machine of the a2 series 4 each, a disk 7.3.
ROWS = """item,unit,market,here,there,date,source
n1-standard,vCPU with its memory,standard,0.5,,2026-08-20,a
n1-standard,vCPU with its memory,spot,0.25,,2026-08-20,a
n1-standard-64,machine,standard,1,,2026-08-20,a
NVIDIA_TESLA_T4,accelerator,standard,2,,2026-08-20,a
a2-highgpu,accelerator with its machine,standard,4,,2026-08-20,a
pd-ssd,GB-month,standard,7.3,,2026-08-20,a
management fee,share of the standard price,standard,0.5,0.5,2026-08-20,a
"""
#: USD an hour of 100 GB with the fee.
DISK = 1.5


def pool(machine_type: str, replica_count: Any = 1, **machine: Any) -> dict[str, Any]:
    return {"machine_spec": {"machine_type": machine_type, **machine}, "replica_count": replica_count}


T4 = {"accelerator_type": "NVIDIA_TESLA_T4", "accelerator_count": 2}


def spec(
    *pools: dict[str, Any], retries: int = 0, name: str = "retrain", **scheduling: str
) -> dict[str, Any]:
    """Returns a pipeline of one custom job, which takes the epochs and the history as parameters."""
    job = {"worker_pool_specs": list(pools), "scheduling": scheduling}
    payload = json.dumps({"display_name": "train", "job_spec": job})
    launcher = "google_cloud_pipeline_components.container.v1.custom_job.launcher"
    container = {
        "command": ["python3", "-m", launcher],
        "args": ["--type", "CustomJob", "--payload", payload],
    }
    task = {
        "componentRef": {"name": "comp-train"},
        "taskInfo": {"name": "train"},
        "retryPolicy": {"maxRetryCount": retries},
    }
    parameters = {
        "epochs": {"parameterType": "NUMBER_INTEGER", "defaultValue": 10.0},
        "history_uri": {"parameterType": "STRING", "defaultValue": ""},
    }
    return {
        "pipelineInfo": {"name": name},
        "root": {"dag": {"tasks": {"train": task}}, "inputDefinitions": {"parameters": parameters}},
        "components": {"comp-train": {"executorLabel": "exec-train"}},
        "deploymentSpec": {"executors": {"exec-train": {"container": container}}},
    }


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text(ROWS)
    return path


@pytest.mark.parametrize(
    ("pools", "scheduling", "rate", "most"),
    [
        # Seven days without a timeout.
        ([pool("n1-standard-8")], {}, 8 * 0.75 + DISK, 168 * 7.5),
        ([pool("n1-standard-8", 3.0)], {"timeout": "3600s"}, 22.5, 22.5),
        ([pool("n1-standard-8", **T4)], {"timeout": "7200s"}, 13.5, 27.0),
        ([pool("n1-standard-8"), pool("n1-standard-8", 2, **T4)], {"timeout": "3600s"}, 34.5, 34.5),
        # The fee on Spot is that of the standard price; without a Spot price it is the standard price.
        ([pool("n1-standard-8")], {"timeout": "3600s", "strategy": "SPOT"}, 8 * 0.5 + DISK, 5.5),
        ([pool("n1-standard-8", **T4)], {"timeout": "3600s", "strategy": "SPOT"}, 11.5, 11.5),
        # The accelerators of some series are in the price of their machines.
        (
            [pool("a2-highgpu-2g", accelerator_type="NVIDIA_TESLA_A100", accelerator_count=2)],
            {"timeout": "3600s"},
            2 * 6 + DISK,
            13.5,
        ),
        # A type of its own takes precedence over its series.
        ([pool("n1-standard-64")], {"timeout": "3600s"}, 3.0, 3.0),
    ],
)
def test_pools_cost_their_parts_an_hour(
    table: Path, pools: list[dict[str, Any]], scheduling: dict[str, str], rate: float, most: float
) -> None:
    (_, text), (_, basis) = estimate(spec(*pools, **scheduling), {}, "here", None, table)

    assert text == f"train {rate:.2f} USD an hour; at most {most:.2f} USD by timeouts and retries"
    assert "list prices of 2026-08-20" in basis
    assert basis.endswith("no earlier run without history_uri")


def test_every_retry_may_run_until_the_timeout(table: Path) -> None:
    (_, text), _ = estimate(spec(pool("n1-standard-8"), retries=2, timeout="3600s"), {}, "here", None, table)

    assert "at most 22.50 USD" in text


@pytest.mark.parametrize(
    ("found", "region", "missing"),
    [
        (pool("n4-standard-8"), "here", "n4-standard-8 in here"),
        (
            pool("n1-standard-8", accelerator_type="NVIDIA_B200", accelerator_count=8),
            "here",
            "NVIDIA_B200 in here",
        ),
        (pool("n1-standard-8"), "there", "n1-standard-8 in there, pd-ssd in there"),
        (pool("n1-standard-8"), "mars-east1", "n1-standard-8 in mars-east1, pd-ssd in mars-east1"),
        ({**pool("n1-standard-8"), "disk_spec": {"boot_disk_type": "pd-x"}}, "here", "pd-x in here"),
        (pool("n1-standard-8", "{{$.outputs.replicas}}"), "here", "n1-standard-8 in here, pd-ssd in here"),
        (pool(""), "here", "a machine of the run in here"),
    ],
)
def test_what_has_no_price_is_named_and_never_free(
    table: Path, found: dict[str, Any], region: str, missing: str
) -> None:
    (_, text), _ = estimate(spec(found), {}, region, None, table)
    assert text == f"no list price known for {missing}"

    with pytest.raises(SettingsError, match=f"no list price known for {missing}"):
        estimate(spec(found), {}, region, 1e9, table)


def write_run(history: Path, name: str, **values: Any) -> None:
    facts: dict[str, Any] = {"pipeline": "retrain", "state": "succeeded", "task_s": {"train": 7200.0}}
    RunRecord(name=name, **{**facts, **values}).write(history / "runs" / name)


def test_hours_are_those_of_the_last_run_that_has_trained_for_the_epochs_of_this_one(
    table: Path, tmp_path: Path
) -> None:
    job, history = spec(pool("n1-standard-8"), timeout="36000s"), tmp_path / "history"
    given = {"history_uri": str(history)}
    _, (_, basis) = estimate(job, given, "here", None, table)
    assert "no earlier run read: " in basis

    write_run(history, "old", parameters={"epochs": 5})
    write_run(history, "failed", state="failed")
    write_run(history, "unchanged", task_s={"configure": 3.0})
    write_run(history, "other", pipeline="tune")
    (_, text), (_, basis) = estimate(job, given, "here", None, table)
    # Two hours of 5 epochs are four of the default's 10.
    assert text == "train 7.50 USD an hour; about 30.00 USD, at most 75.00 USD by timeouts and retries"
    assert basis.endswith("hours as in old")

    assert estimate(job, {**given, "epochs": 5}, "here", 15.0, table)
    with pytest.raises(SettingsError, match=r"about 30\.00 USD.*take other machines or fewer epochs"):
        estimate(job, given, "here", 29.99, table)


def test_a_history_in_a_bucket_that_is_not_mounted_is_read(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "old")
    content = (tmp_path / "runs" / "old" / "run.json").read_bytes()
    given = {"history_uri": "gs://acme/history"}
    with fake_storage("acme", {"history/runs/old/run.json": content, "history/latest.json": b"{}"}) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        _, (_, basis) = estimate(spec(pool("n1-standard-8")), given, "here", None, table)

    assert basis.endswith("hours as in old")


def test_a_damaged_history_costs_no_estimate(table: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.json").write_text("{")
    job, given = spec(pool("n1-standard-8")), {"history_uri": str(tmp_path)}

    (_, text), (_, basis) = estimate(job, given, "here", None, table)

    assert text.startswith("train 7.50 USD an hour; at most")
    assert "no earlier run read: " in basis


def test_the_dearest_choice_of_machines_counts(table: Path, tmp_path: Path) -> None:
    train = """image = "i"
[train]
replica_count = 1
machine_type = "n1-standard-8"
accelerator_type = "NVIDIA_TESLA_T4"
accelerator_count = 2
[train.job]
strategy = "SPOT"
wait = "600s"
[[train.fallback]]
strategy = "STANDARD"
wait = "600s"
[[train.fallback]]
accelerator_type = ""
accelerator_count = 0
"""
    elsewhere = '[[train.fallback]]\nlocation = "us-west1"\ncross_region = true\n'

    def cost(settings: str) -> str:
        (tmp_path / "s.toml").write_text(settings)
        choices = load(tmp_path / "s.toml").train.choices
        job = spec(pool("n1-standard-8", **T4), timeout="3600s", strategy="SPOT")
        container = job["deploymentSpec"]["executors"]["exec-train"]["container"]
        container["args"] += ["--fallback", json.dumps(choices)]
        return estimate(job, {}, "here", None, table)[0][1]

    assert cost(train).startswith("train up to 13.50 USD an hour")
    assert "no list price known for n1-standard-8 in us-west1" in cost(train + 'wait = "600s"\n' + elsewhere)


def test_a_job_in_a_loop_has_no_known_cost(table: Path, tmp_path: Path) -> None:
    job = spec(pool("n1-standard-8"), timeout="3600s")
    tasks = job["root"]["dag"]["tasks"]
    loop = {"componentRef": {"name": "comp-for-loop-1"}, "taskInfo": {"name": "for-loop-1"}}
    job["components"]["comp-for-loop-1"] = {"dag": {"tasks": {"train": tasks.pop("train")}}}
    tasks["for-loop-1"] = loop
    write_run(tmp_path, "old")

    for given in ({}, {"history_uri": str(tmp_path)}):
        (_, text), _ = estimate(job, given, "here", None, table)
        assert text == "no list price known for machines that are known at run time only in here"
        with pytest.raises(SettingsError, match="known at run time only"):
            estimate(job, given, "here", 1e9, table)


def test_all_trials_of_a_study_count() -> None:
    (_, text), _ = estimate(load_pipeline(TUNE), {}, "us-central1", None)

    trial = 2 * (8 * 0.04749975 + 100 * 0.17 / 730) * 1.15
    # 8 trials, 2 at the same time; the training that follows is tried three times.
    most = 168 * (trial * 2 * 4 + trial * 3)
    assert text.startswith(f"hyperparameter-tuning-job {2 * trial:.2f}, train {trial:.2f} USD an hour")
    assert f"at most {most:.2f} USD" in text


def test_a_budget_names_the_timeout_that_fits(table: Path) -> None:
    job = {"pools": [pool("n1-standard-8")], "retries": 1}

    def within(timeout: str) -> Any:
        return estimate(spec(*job["pools"], retries=1, timeout=timeout), {}, "here", 50.0, table)

    with pytest.raises(SettingsError) as refused:
        within("604800s")
    fitting = re.search(
        r"set timeouts that fit \(train (\d+s)\), as \[train.job\] timeout", str(refused.value)
    )
    assert fitting
    assert fitting[1] == "12000s"  # 50 USD / 7.5 an hour / 2 attempts
    assert within(fitting[1])
    with pytest.raises(SettingsError):
        within("12060s")
    with pytest.raises(SettingsError, match="at most inf USD"):
        within("0s")


def test_a_pipeline_without_custom_jobs_costs_nothing_that_is_known(table: Path) -> None:
    bare = spec(pool("n1-standard-8"))
    bare["deploymentSpec"]["executors"]["exec-train"]["container"] = {"command": ["true"]}

    assert estimate(bare, {}, "here", 1.0, table) == []


def test_old_prices_say_so(table: Path) -> None:
    table.write_text(
        ROWS.replace(
            "n1-standard,vCPU with its memory,standard,0.5,,2026-08-20",
            "n1-standard,a,standard,0.5,,2020-01-01",
        )
    )

    _, (_, basis) = estimate(spec(pool("n1-standard-8")), {}, "here", None, table)

    assert "list prices of 2020-01-01 (older than a year) or later" in basis


def test_spot_prices_are_those_of_a_day(table: Path) -> None:
    for strategy in ("SPOT", "STANDARD"):
        _, (_, basis) = estimate(spec(pool("n1-standard-8"), strategy=strategy), {}, "here", None, table)
        assert ("of Spot as on that day" in basis) is (strategy == "SPOT")


def test_each_price_of_the_table_is_positive_and_says_where_and_when_it_was_listed() -> None:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert len({(row["item"], row["market"]) for row in rows}) == len(rows)
    regions = set(rows[0]) - {"item", "unit", "market", "date", "source"}
    assert {"us-central1", "europe-west4"} < regions
    standard = {row["item"]: row for row in rows if row["market"] == "standard"}
    for row in rows:
        prices = [float(row[region]) for region in regions if row[region]]
        assert min(prices, default=0) > 0, row
        assert datetime.date.fromisoformat(row["date"]) <= datetime.date.today()
        assert row["source"].startswith("https://")
        assert row["market"] in ("standard", "spot")
        for region in regions:
            if row["market"] == "spot":
                assert float(row[region]) < float(standard[row["item"]][region]), row


def test_the_table_gives_the_price_that_vertex_lists() -> None:
    """0.21849885 for n1-standard-4 in us-central1, at https://cloud.google.com/vertex-ai/pricing."""
    job = spec(pool("n1-standard-4", 1000), timeout="3600s")

    (_, text), _ = estimate(job, {}, "us-central1", None)

    disk = 1000 * 100 * 0.17 / 730 * 1.15
    assert text.startswith(f"train {218.49885 + disk:.2f} USD an hour")
