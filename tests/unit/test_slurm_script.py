"""Script of a Slurm job: what bash and sbatch read in it, and what a task makes of the environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardline.components.runs.record import ReplicaRecord
from shardline.pipelines.engines.slurm import replica
from shardline.pipelines.engines.slurm.replica import step_environment
from shardline.pipelines.engines.slurm.script import ARRAY_INDEX, BatchJob, batch_script
from shardline.pipelines.engines.slurm.settings import SlurmSettings, load_slurm
from shardline.trainer.base.errors import SettingsError
from tests.helpers.jobs import eventually

HOSTILE = ("a b", "$HOME", "`id`", "it's", '"', "\\", "line\nbreak", "#SBATCH --x", "*", "", "$(id)")

#: srun as the commands of the script see it: it runs one task, whose rank is 0, and prints its own arguments.
_SRUN = """#!/usr/bin/env python3
import json, os, sys
words = sys.argv[1:]
json.dump(words, open(os.environ["CALLS"], "a")); open(os.environ["CALLS"], "a").write("\\n")
count = len(open(os.environ["CALLS"]).readlines())
codes = os.environ["CODES"].split()
sys.exit(int(codes[min(count, len(codes)) - 1]))
"""


def job(directory: Path, *roles: str, **further: Any) -> BatchJob:
    tasks = dict.fromkeys(roles or ("chief",), 1)
    return BatchJob(name="train", tasks=tasks, command=("python", *HOSTILE), directory=directory, **further)


class Scripted:
    """Runs a script with commands of Slurm that record how they were called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls = directory / "calls"
        for name, text in (("srun", _SRUN), ("scontrol", '#!/bin/sh\necho "$@" >> "$CALLS.scontrol"\n')):
            path = directory / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def run(self, script: str, codes: str = "0", **env: str) -> int:
        """Returns the exit code; srun ends with each of `codes` in turn."""
        path = {"PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}"}
        environ = {**os.environ, **path, "CALLS": str(self.calls), "CODES": codes, "SLURM_JOB_ID": "7", **env}
        return subprocess.run(["bash"], input=script, text=True, env=environ, timeout=60).returncode

    @property
    def sruns(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


def test_a_command_reaches_its_task_as_it_was(scripted: Scripted) -> None:
    place = scripted.directory / "my $HOME 100% run"
    assert scripted.run(batch_script(job(place, "chief", "worker"), SlurmSettings())) == 0
    (words,) = scripted.sruns
    assert words[words.index("--") + 1 :] == ["python", *HOSTILE]
    assert words[words.index("--pools") + 1] == "chief=1,worker=1"
    assert words[words.index("--logs") + 1] == str(place)
    assert (place / "exit").read_text() == "0\n"


def test_only_an_array_has_the_number_of_its_element_in_a_command(scripted: Scripted) -> None:
    command = ("write", ARRAY_INDEX, f"--to=it's a b/{ARRAY_INDEX}/$HOME")
    array = BatchJob(name="parts", command=command, directory=scripted.directory / "run", elements=3)
    script = batch_script(array, SlurmSettings())
    assert "#SBATCH --array=0-2\n" in script
    assert scripted.run(script, SLURM_ARRAY_TASK_ID="2") == 0
    assert (
        scripted.run(batch_script(replace(array, elements=0), SlurmSettings()), SLURM_ARRAY_TASK_ID="2") == 0
    )
    element, other = (words[words.index("--") + 1 :] for words in scripted.sruns)
    assert element == ["write", "2", "--to=it's a b/2/$HOME"]
    assert other == list(command)
    assert (scripted.directory / "run" / "2" / "exit").is_file()


@pytest.mark.parametrize(
    ("codes", "starts", "code"),
    [("0", 1, 0), ("2", 1, 2), ("127", 1, 127), ("137 0", 2, 0), ("1 137", 2, 137), ("137 2", 2, 2)],
)
def test_tasks_start_again_after_a_loss_but_not_after_a_mistake(
    scripted: Scripted, codes: str, starts: int, code: int
) -> None:
    assert scripted.run(batch_script(job(scripted.directory), SlurmSettings()), codes) == code
    assert len(scripted.sruns) == starts
    assert (scripted.directory / "exit").read_text() == f"{code}\n"


def test_a_job_that_was_asked_to_stop_is_requeued_and_has_not_ended(scripted: Scripted) -> None:
    assert scripted.run(batch_script(job(scripted.directory), SlurmSettings(grace=0)), "75") == 75
    assert Path(f"{scripted.calls}.scontrol").read_text() == "requeue 7\n"
    assert len(scripted.sruns) == 1
    assert not (scripted.directory / "exit").exists()


def test_of_an_array_only_the_element_that_was_asked_to_stop_is_requeued(scripted: Scripted) -> None:
    script = batch_script(job(scripted.directory, elements=3), SlurmSettings(grace=0))
    assert scripted.run(script, "75", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2") == 75
    assert Path(f"{scripted.calls}.scontrol").read_text() == "requeue 7_2\n"


def test_a_range_of_nodes_is_for_chief_and_workers(tmp_path: Path) -> None:
    settings = SlurmSettings(nodes="1-4")
    with pytest.raises(SettingsError, match="leaves the number of workers open"):
        batch_script(job(tmp_path, "chief", "worker", "ps"), settings)
    assert "--nodes" not in batch_script(job(tmp_path, "chief"), settings)  # one task


def test_a_job_that_is_stopped_at_its_start_again_and_again_is_not_requeued(scripted: Scripted) -> None:
    assert scripted.run(batch_script(job(scripted.directory), SlurmSettings(grace=60)), "75") == 75
    assert (scripted.directory / "exit").read_text() == "75\n"
    assert not Path(f"{scripted.calls}.scontrol").exists()


def test_a_module_that_is_missing_ends_the_job_before_its_tasks(scripted: Scripted) -> None:
    assert scripted.run(batch_script(job(scripted.directory), SlurmSettings(modules=("cuda/12",)))) == 2
    assert not scripted.calls.exists()


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_container_sees_the_run_and_the_working_directory(scripted: Scripted, runtime: str) -> None:
    place, here = scripted.directory / "my run", os.getcwd()
    settings = SlurmSettings(container="/a.sif", container_runtime=runtime, gres="gpu:1")
    assert scripted.run(batch_script(job(place), settings)) == 0
    (words,) = scripted.sruns
    started = words[words.index("--ntasks=1") + 1 : words.index("-m")]
    if runtime == "pyxis":
        mounts = f"--container-mounts={place}:{place},{here}:{here}"
        assert started == ["--container-image=/a.sif", mounts, f"--container-workdir={here}", "python"]
    else:
        bound = ["--bind", f"{place},{here}", "--pwd", here]
        assert started == ["apptainer", "exec", "--nv", *bound, "/a.sif", "python"]


def test_pools_share_an_allocation_unless_they_serve_or_ask_for_other_things(tmp_path: Path) -> None:
    plain = SlurmSettings(partition="gpu", gres="gpu:1")
    own = replace(plain, workers={"gres": "gpu:2"}, parameter_servers={"partition": "cpu"})
    assert "hetjob" not in batch_script(job(tmp_path, "chief", "worker"), plain)
    assert batch_script(job(tmp_path, "chief", "worker"), own).count("#SBATCH hetjob\n") == 1
    script = batch_script(job(tmp_path, "chief", "worker", "ps", "evaluator"), own)
    assert script.count("#SBATCH hetjob\n") == 3
    components = script.split("#SBATCH hetjob\n")
    assert ["cpu" in part.partition("\n\n")[0] for part in components] == [False, False, True, False]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_range_of_nodes_has_a_worker_on_each(tmp_path: Path) -> None:
    script = batch_script(job(tmp_path, "chief", "worker"), SlurmSettings(nodes="1-4"))
    assert "#SBATCH --nodes=1-4\n" in script
    assert "#SBATCH --ntasks" not in script  # with which Slurm would take the least nodes
    assert "--ntasks-per-node=1" in script
    assert "--pools 'chief=1,worker=*'" in script


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a'b", "a\\b"])
def test_a_directory_that_sbatch_would_read_otherwise_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="Slurm takes no directory"):
        batch_script(job(tmp_path / name), SlurmSettings())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("partiton = 'a'", "unknown key engine.slurm.partiton; did you mean engine.slurm.partition?"),
        ("partition = 'a b'", "engine.slurm.partition must be a partition"),
        ('account = "a\\n#SBATCH --uid=0"', "engine.slurm.account must be an account"),
        ("time = '1h'", "engine.slurm.time must be minutes"),
        ("nodes = '4-'", "engine.slurm.nodes must be a number"),
        ("mem = '16 GB'", "engine.slurm.mem must be a size"),
        ("options = ['exclusive']", "engine.slurm.options must be lines such as --exclusive"),
        ('options = ["--x\\nrm"]', "engine.slurm.options must be lines such as --exclusive"),
        ("container_runtime = 'docker'", "container_runtime must be 'apptainer' or 'pyxis', got 'docker'"),
        ("venv = 'v'\ncontainer = 'c'", "venv and container exclude each other"),
        ("restarts = -1", "engine.slurm.restarts must be 0 to 100, got -1"),
        ("worker = {}", "unknown key engine.slurm.worker; did you mean engine.slurm.workers?"),
        ("workers = { nodes = 'x' }", "engine.slurm.workers.nodes must be a number"),
        ("workers = { venv = 'x' }", "unknown key engine.slurm.workers.venv"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f"[engine.slurm]\n{table}\n")
    with pytest.raises(SettingsError) as error:
        load_slurm(path)
    assert message in str(error.value)


def test_settings_are_those_of_the_project_or_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_slurm(None) == SlurmSettings()
    Path("settings.toml").write_text(
        "[engine.slurm]\ntime = '1-12:00:00'\n[engine.slurm.evaluator]\nmem = '1G'"
    )
    found = load_slurm(None)
    assert (found.time, found.for_pool("evaluator").mem, found.for_pool("chief").mem) == (
        "1-12:00:00",
        "1G",
        "",
    )


def test_the_components_of_a_job_are_one_list_of_tasks() -> None:
    environ = {
        **{"SLURM_HET_SIZE": "2", "SLURM_PROCID": "1", "TF_CONFIG": "of the shell"},
        **{"SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "m1"},
        **{"SLURM_TASKS_PER_NODE_HET_GROUP_0": "1(x2)", "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2"},
        **{"SLURM_NTASKS_HET_GROUP_0": "2", "SLURM_NTASKS_HET_GROUP_1": "2"},
    }
    found = step_environment(environ, 2)
    assert (found["SLURM_PROCID"], found["SLURM_STEP_NUM_TASKS"]) == ("3", "4")
    assert (found["SLURM_STEP_NODELIST"], found["SLURM_STEP_TASKS_PER_NODE"]) == ("n[1-2],m1", "1(x2),2")
    assert "TF_CONFIG" not in found


def test_a_missing_command_is_a_line_in_the_log_of_its_replica(tmp_path: Path) -> None:
    done = _replica(tmp_path, "--pools", "chief=1", "--", "no-such-program")
    assert (done.returncode, done.stdout + done.stderr) == (127, "")
    assert "no command 'no-such-program'" in (tmp_path / "logs" / "chief-0.log").read_text()


def test_a_task_that_is_one_too_many_says_so(tmp_path: Path) -> None:
    done = _replica(tmp_path, "--pools", "chief=1,worker=1", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Slurm has started 1 tasks, and the job has 2 replicas\n"


@pytest.mark.parametrize(("signum", "end"), [(signal.SIGTERM, "SIGUSR1"), (signal.SIGKILL, None)])
def test_a_program_ends_by_its_own_signals_or_with_its_wrapper(
    signum: int, end: str | None, tmp_path: Path
) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    words = ["-m", replica.__name__, "--logs", str(tmp_path), "--pools", "chief=1", "--"]
    wrapper = subprocess.Popen([sys.executable, *words, sys.executable, "-c", program])
    log, record = tmp_path / "chief-0.log", tmp_path / "chief-0.json"
    process = psutil.Process(int(str(eventually(lambda: log.is_file() and log.read_text()))))
    wrapper.send_signal(signum)
    if end:
        process.send_signal(signal.SIGUSR1)
    wrapper.wait(timeout=60)
    eventually(lambda: not process.is_running())

    assert wrapper.returncode == (128 + signal.SIGUSR1 if end else -signal.SIGKILL)
    last = ReplicaRecord.read(record).starts[-1]
    assert (last.exit, last.stopped, last.end_s is None) == (end, bool(end), not end)


def _replica(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "shardline.pipelines.engines.slurm.replica",
        "--logs",
        str(tmp_path / "logs"),
    ]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=60)
