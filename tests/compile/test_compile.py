"""The compiled pipeline: what is in it, that it is up to date, and what compiling costs."""

import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from shardline.components.custom_job import Cluster, CustomJobSettings, WorkerPool
from shardline.components.rehearse import rehearsal
from shardline.pipelines import settings
from shardline.pipelines.cli import main as cli
from shardline.pipelines.compile import compile_pipeline
from shardline.pipelines.settings import Settings
from shardline.pipelines.spec import defaults
from shardline.trainer.base.errors import SettingsError, ShardlineError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def spec():
    return yaml.safe_load((ROOT / "compiled" / "retrain.yaml").read_text())


def pools(spec, step="train"):
    return spec["components"][f"comp-{step}"]["inputDefinitions"]["parameters"]["worker_pool_specs"][
        "defaultValue"
    ]


def tasks(spec):
    """Returns the tasks by name, wherever they stand."""
    return {
        name: task
        for component in (spec["root"], *spec["components"].values())
        for name, task in component.get("dag", {}).get("tasks", {}).items()
    }


def test_the_committed_file_is_what_the_code_compiles_to():
    found = (ROOT / "compiled" / "retrain.yaml").read_text()

    assert found == compile_pipeline(settings.load_settings(ROOT / "settings" / "local.toml"))


def test_compiling_loads_neither_tensorflow_nor_the_vertex_client():
    program = (
        "import sys; from pathlib import Path; from shardline.pipelines import compile, settings\n"
        "from shardline.pipelines.parameters import load_study\n"
        "environment = settings.load_settings(Path('settings/local.toml'))\n"
        "compile.compile_pipeline(environment, load_study(Path('settings/tune.toml')))\n"
        "upload = settings.ModelUpload(display_name='d', serving_image_uri='s:1')\n"
        "compile.compile_pipeline(settings.replace(environment, model_upload=upload))\n"
        "heavy = {'tensorflow', 'keras', 'google.cloud.aiplatform', 'sklearn', 'rich', 'optuna'}\n"
        "loaded = sorted(heavy & set(sys.modules)); sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_one_chief_and_the_workers(spec):
    chief, workers = pools(spec)

    assert (chief["replica_count"], workers["replica_count"]) == (1, 1)
    assert chief["container_spec"] == workers["container_spec"]
    assert chief["container_spec"]["image_uri"] == "shardline:0.1.0"


def test_settings_reach_the_worker_pools():
    pool = WorkerPool(
        replica_count=4, machine_type="n1-standard-8", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=2
    )
    job = CustomJobSettings(cluster=Cluster.of(pool))
    spec = yaml.safe_load(compile_pipeline(Settings(image="registry/image:1", train=job)))

    assert [pool["replica_count"] for pool in pools(spec)] == [1, 3]
    assert [pool["machine_spec"] for pool in pools(spec)] == 2 * [
        {"machine_type": "n1-standard-8", "accelerator_type": "NVIDIA_TESLA_T4", "accelerator_count": 2}
    ]
    images = {e["container"]["image"] for e in spec["deploymentSpec"]["executors"].values()}
    assert {image for image in images if "pipeline-components" not in image} == {"registry/image:1"}
    tasks = [t for c in spec["components"].values() for t in c.get("dag", {}).get("tasks", {}).items()]
    readers = {
        name: task["inputs"]["parameters"]["readers"]["runtimeValue"]["constant"]
        for name, task in tasks
        if "readers" in task.get("inputs", {}).get("parameters", {})
    }
    assert readers == {"detect-changes": 4, "preprocess": 4, "rehearse": 4}


def test_the_rehearsal_from_the_command_line_has_the_cluster_of_the_job(tmp_path, monkeypatch):
    pool, given = WorkerPool(machine_type="n1-standard-8"), []
    cluster = Cluster(chief=pool, workers=replace(pool, replica_count=2), parameter_servers=pool)
    path = tmp_path / "retrain.yaml"
    path.write_text(compile_pipeline(Settings(image="image:1", train=CustomJobSettings(cluster=cluster))))
    monkeypatch.setattr(rehearsal, "rehearse", lambda *objects, **replicas: given.append(replicas))

    done = CliRunner().invoke(cli.main, ["rehearse", str(path), str(tmp_path)])

    assert (done.output, given) == ("", [{"readers": 3, "parameter_servers": 1}])


def test_the_example_settings_are_valid():
    found = settings.load_settings(ROOT / "settings" / "vertex.toml.example")

    assert found.train.cluster.chief.accelerator_count == 1


def test_every_example_that_is_commented_out_is_valid(tmp_path):
    """As many of them as go together: the Reduction Server takes the parameter servers' place."""
    text = (ROOT / "settings" / "vertex.toml.example").read_text()
    servers = text[text.index("# [train.parameter_servers]") : text.index("# Or pool 2")]
    enabled = re.sub(r"^# (?=\[|\w+ = )", "", text.replace(servers, ""), flags=re.MULTILINE)
    # Which exclude webhook, and container.
    enabled = re.sub(r"^(emails|venv) = .*", "", enabled, flags=re.MULTILINE)
    (tmp_path / "all.toml").write_text(enabled)

    found = settings.load_settings(tmp_path / "all.toml").train

    assert len(found.cluster.pools) == 4
    known = {item.name for kind in (WorkerPool, CustomJobSettings) for item in fields(kind)} - {"cluster"}
    assert {name for name in known if f"{name} = " not in text} == {"extra"}


@pytest.fixture
def compiled_at_once(monkeypatch):
    """What local.toml compiles to is taken from the committed file: these tests are about what is written."""
    text = (ROOT / "compiled" / "retrain.yaml").read_text()
    monkeypatch.setattr("shardline.pipelines.compile.compile_pipeline", lambda settings, study=None: text)


@pytest.mark.usefixtures("compiled_at_once")
def test_drift_is_an_error(tmp_path):
    output = tmp_path / "retrain.yaml"
    arguments = ["compile", "--settings", str(ROOT / "settings/local.toml"), "--output", str(output)]

    missing = CliRunner().invoke(cli.main, [*arguments, "--check"])
    assert missing.exit_code == 2
    assert "no compiled pipeline" in missing.output
    assert "written" in CliRunner().invoke(cli.main, arguments).output
    assert "up to date" in CliRunner().invoke(cli.main, arguments).output
    assert CliRunner().invoke(cli.main, [*arguments, "--check"]).exit_code == 0
    output.write_text(output.read_text() + "# edited\n")
    drifted = CliRunner().invoke(cli.main, [*arguments, "--check"])
    assert drifted.exit_code == 2
    assert "differs from what the code compiles to; the same command without --check" in drifted.output


def compile_to(output):
    command = ["compile", "--settings", str(ROOT / "settings" / "local.toml"), "--output", str(output)]
    return CliRunner().invoke(cli.main, command)


def test_standard_output_holds_the_pipeline_and_nothing_else(tmp_path):
    command = [sys.executable, "-c", "from shardline.pipelines.cli.main import main; main()", "compile"]
    given = ["--settings", "settings/local.toml", "--output", "/dev/stdout"]
    done = subprocess.run([*command, *given], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0
    assert done.stdout == (ROOT / "compiled" / "retrain.yaml").read_text()
    assert done.stderr == "/dev/stdout written\n"


@pytest.mark.usefixtures("compiled_at_once")
def test_the_output_may_be_a_file_of_any_kind_before(tmp_path):
    """It is compared with what is written, without being taken for text."""
    output = tmp_path / "p.yaml"
    output.write_bytes(bytes(range(256)))

    assert compile_to(output).exit_code == 0
    assert output.read_text() == (ROOT / "compiled" / "retrain.yaml").read_text()


def test_tables_of_the_settings_are_machines_of_the_tasks(tmp_path):
    """A task asks for cores and memory, or is a custom job on a machine with a disk of its own."""
    (tmp_path / "settings.toml").write_text(
        'image = "r/i:1"\n[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n'
        '[preprocess]\nmachine_type = "n1-standard-16"\ndisk = 500\nretries = 1\ncache = false\n'
        '[validate]\ncpu = 4\naccelerator_type = "NVIDIA_TESLA_T4"\naccelerator_count = 1\ntimeout = "60s"\n'
        "[register]\nretries = 0\n"
        '[train.job.extra]\nenable_web_access = true\nreserved_ip_ranges = ["r"]\n'
    )
    spec = yaml.safe_load(compile_pipeline(settings.load_settings(tmp_path / "settings.toml")))
    containers = {
        name.removeprefix("exec-"): executor["container"]
        for name, executor in spec["deploymentSpec"]["executors"].items()
    }
    found = tasks(spec)

    assert '"enable_web_access": true' in str(containers["train"])
    assert '"enable_web_access": true' not in str(containers["preprocess"])
    assert '"reserved_ip_ranges": ["r"]' in str(containers["preprocess"])
    (pool,) = pools(spec, "preprocess")
    assert pool["machine_spec"] == {"machine_type": "n1-standard-16"}
    assert pool["disk_spec"] == {"boot_disk_size_gb": 500}
    assert found["preprocess"]["retryPolicy"]["maxRetryCount"] == 1
    assert "enableCache" not in found["preprocess"].get("cachingOptions", {})
    for name in ("rehearse", "export-validate"):
        assert containers[name]["resources"] == {
            "cpuLimit": 4.0,
            "memoryLimit": 32.0,
            "resourceCpuLimit": "4",
            "resourceMemoryLimit": "32G",
            "accelerator": {
                **{"count": "1", "type": "NVIDIA_TESLA_T4"},
                **{"resourceCount": "1", "resourceType": "NVIDIA_TESLA_T4"},
            },
        }
        assert {"name": "SHARDLINE_TIMEOUT", "value": "60"} in containers[name]["env"]
        assert found[name]["retryPolicy"]["maxRetryCount"] == 2
    assert "resources" not in containers["register"]
    assert "retryPolicy" not in found["register"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[preprocess]\ncpu = -1", "takes no machine of cpu = -1"),
        ('[validate]\nmemory = "much"', "takes no machine of .*memory = 'much'"),
        ("[preprocess]\ntasks = 0", "preprocess.tasks must be"),
        ("[validate]\ndisk = 200", "validate.disk needs a machine_type"),
        ('[validate]\nmachine_type = "n1-standard-8"\ncpu = 8', "validate.machine_type says how many cores"),
        ('[register]\nmachine_type = "n1-standard-8"', "register.machine_type: these tasks are small"),
        ('[register]\ntimeout = "0s"', "register.timeout must be seconds"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(tmp_path, table, message):
    file = tmp_path / "settings.toml"
    file.write_text(f'image = "r/i:1"\n{table}\n[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n')

    with pytest.raises(SettingsError, match=message):
        compile_pipeline(settings.load_settings(file))


def test_the_parameters_of_a_project_are_the_defaults_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploaded in the console, or run without a flag, it trains the project's model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def build(): ...\n")
    shutil.copy(ROOT / "settings" / "local.toml", tmp_path)
    parameters = tmp_path / "params.toml"
    parameters.write_text('model = "mlp"\nepochs = 3\nencoding = "png"\n')
    found = defaults(yaml.safe_load(compile_pipeline(settings.load_settings(tmp_path / "local.toml"))))

    assert (found["model"], found["epochs"], found["data_options"]) == ("mlp", 3, {"encoding": "png"})

    for wrong, words in (
        ("epohcs = 3", "did you mean epochs"),
        ("epochs = -1", "epochs must be at least 1"),
        ('model = "mine:biuld"', "mine has no 'biuld', it has build"),
    ):
        parameters.write_text(wrong)
        with pytest.raises(ShardlineError, match=f"params.toml: .*{words}"):
            compile_pipeline(settings.load_settings(tmp_path / "local.toml"))


def test_objects_among_the_parameters_are_written_in_one_order(tmp_path: Path) -> None:
    shutil.copy(ROOT / "settings" / "local.toml", tmp_path)
    (tmp_path / "params.toml").write_text("split = {train = 0.7, validation = 0.1, test = 0.2}\n")
    (text,) = {compile_pipeline(settings.load_settings(tmp_path / "local.toml")) for _ in range(4)}

    assert "dict [Default: {'split': {'test': 0.2, 'train': 0.7, 'validation': 0.1}}]\n" in text
