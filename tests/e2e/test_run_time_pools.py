"""Worker pools as a parameter of the run: checked at its start, and used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kfp import compiler, dsl

from shardline.components.train.component import check_worker_pools, custom_job_at_run_time
from shardline.components.vertex.job import CustomJobSettings
from shardline.components.vertex.pools import Cluster, WorkerPool
from tests.helpers.datasets import write_dataset

pytestmark = [pytest.mark.e2e, pytest.mark.multiworker, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
POOL = {"machine_spec": {"machine_type": "n1-standard-8"}, "replica_count": 1}


def component(function):
    return dsl.component(base_image="toy:1", install_kfp_package=False)(function)


@component
def load(source: str, dataset: dsl.Output[dsl.Dataset]):
    """Copies a dataset directory."""
    import shutil

    shutil.copytree(source, dataset.path)


@component
def judge(model: dsl.Input[dsl.Model]):
    """Says who has trained."""
    import json
    from pathlib import Path

    from shardline.trainer import progress

    assert (Path(model.path) / "model.keras").is_file()
    progress.fact("trained", json.dumps(sorted(path.name for path in Path(model.path).iterdir())))


def run(tmp_path, pools):
    machine = WorkerPool(machine_type="n1-standard-4")
    settings = CustomJobSettings(cluster=Cluster(chief=machine), num_retries=0)
    train = custom_job_at_run_time(component, "toy:1", settings)

    @dsl.pipeline(name="run-time")
    def pipeline(source: str, worker_pool_specs: list = []):  # noqa: B006  # KFP reads the default
        checked = component(check_worker_pools)(worker_pool_specs=worker_pool_specs, strategy="SPOT")
        data = load(source=source).after(checked)
        trained = train(
            worker_pool_specs=checked.output,
            dataset=data.outputs["dataset"],
            training={
                "model": "tests.helpers.models:dropout",
                "hparams": {"rate": 0.5},
                "epochs": 1,
                "per_replica_batch_size": 8,
            },
        )
        judge(model=trained.output)

    compiler.Compiler().compile(pipeline, str(tmp_path / "p.yaml"))
    write_dataset(tmp_path / "data")
    return subprocess.run(
        [
            *(str(Path(sys.executable).with_name("shardline")), "run", str(tmp_path / "p.yaml")),
            *("--runs-dir", str(tmp_path / "runs"), "--param", f"source={tmp_path / 'data'}"),
            *("--param", f"worker_pool_specs={json.dumps(pools)}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_the_pools_of_a_parameter_train(tmp_path):
    done = run(tmp_path, [POOL, POOL])

    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "runs" / "latest" / "run.json").read_text())["facts"]
    assert facts["replicas"] == 2
    assert list((tmp_path / "runs").glob("*/outputs/**/dataset"))
    assert "model.keras" in facts["trained"]


def test_wrong_pools_end_the_run_at_its_start(tmp_path):
    done = run(tmp_path, [{**POOL, "replica_count": 2}])

    assert done.returncode == 2
    assert "the chief is one replica, got replica_count 2; further replicas are workers" in done.stderr
    assert not list((tmp_path / "runs").glob("*/outputs/**/dataset"))
