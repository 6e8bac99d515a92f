"""The rehearsal before a training job: what would fail after hours fails in it, with the message of then."""

import shutil
import subprocess
import sys

import pytest
from kfp import dsl

from shardline.components.changes import detection as changes
from shardline.components.rehearse import component, rehearsal
from shardline.components.rehearse.rehearsal import rehearse, training_job_directory
from shardline.components.storage import Storage
from shardline.components.train import read_training
from shardline.components.validate.rules import Gate
from shardline.trainer.base import progress
from shardline.trainer.base.errors import DatasetError, ModelError, RunError, SettingsError
from tests.helpers.datasets import write_dataset
from tests.helpers.exports import publish_next, write_export

MODEL = "tests.helpers.models:synchronized"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory, records={"train": 96, "validation": 24, "test": 60})
    return directory


@pytest.fixture
def unrehearsed(monkeypatch):
    """The frame of a rehearsal without its inside."""
    monkeypatch.setattr(rehearsal, "rehearse", lambda *arguments, **options: None)


@pytest.fixture
def reports():
    """Reported lines."""
    lines = []
    with progress.sink(lambda event: lines.append(f"{event.topic}: {event.text}")):
        yield lines


def training(**changes):
    return read_training({"model_function": MODEL, "options": {}, **changes})


def run(dataset, tmp_path, **changes):
    """Rehearses a run as its task does."""
    arguments = {
        "dataset": dsl.Dataset(uri=str(dataset)),
        "job": dsl.Artifact(uri=f"{tmp_path}/outputs/retrain-1/rehearse/job"),
        "model_function": MODEL,
        "train_options": {"keep_checkpoints": 2.0},
        "readers": 2,
        "job_name": "retrain-1",
    }
    return component.rehearse(**{**arguments, **changes})


def test_a_run_that_works_is_rehearsed_with_two_lines_and_leaves_only_its_directory(
    dataset, tmp_path, reports, monkeypatch
):
    monkeypatch.setenv("SLURM_NTASKS", "4")  # in the script of sbatch
    before = sorted(dataset.iterdir())
    base = run(dataset, tmp_path)

    assert base == f"{tmp_path}/outputs/jobs/retrain-1"
    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")]
    assert left == ["outputs", "outputs/jobs", "outputs/jobs/retrain-1"]
    assert sorted(dataset.iterdir()) == before
    assert [line.split(":")[0] for line in reports] == ["rehearse", "rehearse"]
    assert "trains, saves, loads, exports, can be judged" in reports[-1]


@pytest.mark.parametrize(
    ("changes", "gate", "error", "words"),
    [
        ({"model_function": "tests.helpers.unexportable:lambda_layer"}, {}, ModelError, "Lambda"),
        ({"options": {"early_stopping": "val_f1"}}, {}, SettingsError, "val_f1"),
        ({"options": {"jit_compile": "on"}}, {}, SettingsError, "jit_compile needs strategy one_dev"),
        ({"per_replica_batch_size": 64}, {}, SettingsError, "each of 2 workers has 48"),
        ({"options": {"augment": "tests.helpers.models:nothing"}}, {}, SettingsError, "nothing"),
        ({}, {"rules": ("recall[class=bottle] >= 0.9",)}, SettingsError, "class 'bottle'"),
        ({}, {"champion_uri": "{}/nowhere"}, SettingsError, "nowhere"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_what_would_fail_after_the_cluster_was_paid_for_fails_here(
    dataset, tmp_path, changes, gate, error, words
):
    gate = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in gate.items()}

    with pytest.raises(error, match=words):
        rehearse(dataset, training(**changes), Gate(**gate), readers=2)


def test_a_champion_that_cannot_be_read_is_found_before_the_training_not_after_it(dataset, tmp_path):
    store = tmp_path / "champions"
    store.mkdir()
    publish_next(write_export(tmp_path / "export"), store)

    with pytest.raises(ModelError, match="the champion cannot be compared with"):
        rehearse(dataset, training(), Gate(champion_uri=str(store)))


def test_a_rule_that_the_few_examples_cannot_answer_is_left_to_the_validation(dataset, monkeypatch):
    """Without an example of some class there is no ROC curve, which says nothing of all examples."""
    monkeypatch.setattr(rehearsal, "_MAX_EXAMPLES", 2)

    rehearse(dataset, training(), Gate(rules=("roc_auc >= 0.7",)))


def test_a_dataset_with_a_shard_gone_is_refused(dataset, tmp_path):
    write_dataset(tmp_path / "gone")
    shard = next((tmp_path / "gone").glob("test-*"))
    shard.unlink()

    with pytest.raises(DatasetError, match=f"cannot read .*{shard.name}.*preprocess the data again"):
        rehearse(tmp_path / "gone", training(), Gate())


@pytest.mark.usefixtures("unrehearsed")
def test_a_run_is_continued_from_a_copy_of_the_checkpoints_of_another(dataset, tmp_path, reports):
    """Each run writes in its own directory, from which it can be continued in turn."""
    with pytest.raises(SystemExit):
        run(dataset, tmp_path, continue_run="retrain-0")
    assert "no checkpoints of the run retrain-0 in " in reports[-1]
    jobs = tmp_path / "outputs" / "jobs"
    checkpoints = jobs / "retrain-0" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("ckpt-7.index", "ckpt-7.data-00000-of-00001", "run.json"):
        (checkpoints / name).write_text(name)

    run(dataset, tmp_path, continue_run="retrain-0")
    (jobs / "retrain-1" / "checkpoints" / "ckpt-9.index").touch()
    run(dataset, tmp_path, continue_run="retrain-0")  # the task is tried again
    for name in ("retrain-1", str(jobs / "retrain-1"), f"{jobs}/retrain-1/checkpoints/"):
        shutil.rmtree(jobs / "retrain-2", ignore_errors=True)
        job = dsl.Artifact(uri=f"{tmp_path}/outputs/retrain-2/rehearse/job")
        run(dataset, tmp_path, continue_run=name, job=job, job_name="retrain-2")
        found = sorted(path.name for path in (jobs / "retrain-2" / "checkpoints").iterdir())
        assert found == ["ckpt-7.data-00000-of-00001", "ckpt-7.index", "ckpt-9.index", "run.json"]


def test_the_directory_of_a_job_is_the_same_for_all_attempts_of_a_run():
    """The platform puts the number of the project and of the task's attempt into the path of the artifact."""
    first = training_job_directory("gs://b/runs/123456/retrain-7/rehearse_-52/job", "retrain-7")

    assert first == "gs://b/runs/jobs/retrain-7"
    assert training_job_directory("gs://b/runs/123456/retrain-7/rehearse_99/job", "retrain-7") == first
    with pytest.raises(RunError, match="in no directory of the run 'retrain-8'"):
        training_job_directory("gs://b/runs/123456/retrain-7/rehearse_99/job", "retrain-8")


def test_a_cached_dataset_whose_shards_are_gone_is_made_again(dataset, tmp_path, reports, monkeypatch):
    """A lifecycle rule removes shards; KFP's cache never looks. A refused run has made its dataset."""

    def refuse(*arguments, **options):
        raise SettingsError("a slip of the hand")

    monkeypatch.setattr(rehearsal, "rehearse", refuse)
    history = tmp_path / "history"
    copy = tmp_path / "copy"
    write_dataset(copy)

    first = changes.dataset_key(Storage(history), "abc")
    assert changes.dataset_key(Storage(history), "abc") != first, "a dataset that was never seen complete"
    known = changes.dataset_key(Storage(history), "abc")
    with pytest.raises(SystemExit):
        run(copy, tmp_path, history_uri=str(history), fingerprint=known)
    assert "a slip of the hand" in reports[-1]
    assert changes.dataset_key(Storage(history), "abc") == known

    next(copy.glob("train-*")).unlink()
    again = changes.dataset_key(Storage(history), "abc")
    assert again != known
    assert again.startswith("abc-")
    assert any("is no longer complete: it is written again" in line for line in reports)


def test_a_task_that_takes_too_long_ends_itself():
    program = (
        "import time\nfrom shardline.trainer.base.progress import exit_on_error\n"
        "with exit_on_error('validate'):\n    time.sleep(60)\n"
    )
    environment = {"SHARDLINE_TIMEOUT": "0.2", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)

    said = "validate: error: not done after 0 s; give it more time, or a larger machine\n"
    assert (done.returncode, done.stderr) == (1, said)
