"""The committed tuning pipeline, run whole on this machine by the command a user gives."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.multiworker, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
SHARDLINE = str(Path(sys.executable).with_name("shardline"))
#: The second value is more than the training split has: that trial fails, and the study goes on.
STUDY = {
    "metric": "val_accuracy",
    "algorithm": "GRID_SEARCH",
    "max_trial_count": 3,
    "parameter": [{"name": "per_replica_batch_size", "type": "discrete", "values": [32, 100000]}],
}


@pytest.mark.parametrize("good", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_the_best_of_some_trials_is_trained_and_published_if_it_is_good_enough(tmp_path, good):
    least = 0.2 if good else 1.0
    given = {
        "study": json.dumps(STUDY),
        "trial_epochs": 1,
        "epochs": 2,
        "rules": json.dumps([f"accuracy >= {least}"]),
    }
    done = subprocess.run(
        [
            *(SHARDLINE, "run", "compiled/tune.yaml", "--runs-dir", str(tmp_path / "runs")),
            *(part for name, value in given.items() for part in ("--param", f"{name}={value}")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").glob("20*")
    facts = json.loads((run / "run.json").read_text())["facts"]
    assert facts["best trial"] == "1"
    assert facts["blessed"] is good
    assert "infeasible: per_replica_batch_size 100000 is larger than the training split" in done.stdout
    # The final training has the parameters of the best trial; a grid of two points ends after them.
    settings = json.loads((Path(facts["model"]).parent / "settings.json").read_text())
    assert "100000" not in json.dumps(settings)
    assert "global batch 64 = 2 x 32" in done.stdout
    trials = json.loads(Path(facts["trials"]).with_name("trials.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["SUCCEEDED", "INFEASIBLE"]
    assert (tmp_path / "runs" / "champions" / "digits" / "champion.json").is_file() is good
    logs = {path.parent.name for path in run.glob("replicas/hyperparameter-tuning-job/*/chief-0.log")}
    assert logs == {"trial-1", "trial-2"}
