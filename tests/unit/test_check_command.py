"""`shardline check`: what it says of files, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from docs.reference import rules_page
from shardline.pipelines.check import RULES
from shardline.pipelines.cli import main as cli
from tests.helpers.checks import job, pipeline, pool, task

ROOT = Path(__file__).resolve().parents[2]
RETRAIN = ROOT / "compiled" / "retrain.yaml"
BROKEN = job(pool(replica_count=2), display_name="train")


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.main, ["check", *map(str, arguments)])


def written(path: Path, spec: Any) -> Path:
    path.write_text(json.dumps(spec))
    return path


def test_every_rule_has_an_example() -> None:
    """A row of the tables of broken and repaired things in the tests of the rules."""
    text = (Path(__file__).parent / "test_check_rules.py").read_text()

    assert set(re.findall(r'"(SL\d{3})", ', text)) | set(re.findall(r'"(SL\d{3})",\n', text)) == set(RULES)


def test_the_page_is_what_the_rules_say() -> None:
    assert (ROOT / "docs" / "check.md").read_text() == rules_page(), "python -m docs.reference"


def test_our_own_pipeline_and_settings_are_right() -> None:
    found = run(RETRAIN, ROOT / "settings" / "local.toml")

    assert found.exit_code == 0, found.output
    assert "error" not in found.output


def test_the_examples_placeholders_are_refused_and_nothing_else_of_it(tmp_path: Path) -> None:
    example = ROOT / "settings" / "vertex.toml.example"
    found = run(example)

    assert found.exit_code == 1
    assert set(re.findall(r"^error (SL\d+)", found.output, re.M)) == {"SL412"}
    assert "where my-project stands for your own" in found.output
    assert "project is 'my-project'" in found.output
    assert "pipeline_root is 'gs://my-bucket" in found.output
    own = tmp_path / "vertex.toml"
    own.write_text(example.read_text().replace("my-project", "acme-vision").replace("my-bucket", "acme-data"))
    assert run(own).exit_code == 0


def test_a_file_of_schedules_is_checked_with_its_pipelines(tmp_path: Path) -> None:
    (tmp_path / "schedules.toml").write_text(
        f"""[schedules.nightly]
cron = "TZ=UTC */10 * * * *"
pipeline = "{RETRAIN}"
parameters = {{ source = "images:photos", champion_uri = "" }}
[schedules.remote]
cron = "TZ=UTC 0 6 * * *"
pipeline = "https://europe-west4-kfp.pkg.dev/acme-vision/pipelines/retrain/latest"
"""
    )
    found = run(tmp_path / "schedules.toml")

    assert found.exit_code == 1
    said = set(re.findall(r"(\w+ SL\d+) schedules.nightly: ", found.output))
    assert said == {"error SL607", "warning SL909"}
    assert "remote" not in found.output


def test_an_error_says_where_and_why_and_what_to_do(tmp_path: Path) -> None:
    found = run(written(tmp_path / "p.yaml", BROKEN))

    assert found.exit_code == 1
    assert found.output.splitlines() == [
        "error SL101 task custom-training-job: worker pool 0 has replica_count 2",
        "    -> set replica_count to 1, and put more replicas into worker pool 1",
        f"{tmp_path / 'p.yaml'}: 1 error",
    ]


def test_the_same_finding_in_many_places_is_one(tmp_path: Path) -> None:
    found = run(written(tmp_path / "p.yaml", job(pool(), *4 * [pool(disk_spec={"boot_disk_size_gb": 50})])))

    assert found.output.count("SL114") == 1
    assert "and 1 more" in found.output


def test_json_and_warnings_which_are_no_failure(tmp_path: Path) -> None:
    good, bad = written(tmp_path / "good.yaml", pipeline()), written(tmp_path / "bad.json", BROKEN)
    found = run(good, bad, "--json")

    assert found.exit_code == 1
    warned = run(written(tmp_path / "p.yaml", job(strategy="SPOT")))
    assert (warned.exit_code, "warning SL207" in warned.output) == (0, True)
    first, second = json.loads(found.output)["files"]
    assert first == {"file": str(good), "errors": 0, "warnings": 0, "findings": []}
    assert (second["errors"], second["findings"][0]["code"]) == (1, "SL101")
    assert set(second["findings"][0]) == {"code", "severity", "where", "why", "fix"}


def test_parameters_are_checked_when_they_are_given(tmp_path: Path) -> None:
    path = written(tmp_path / "p.yaml", pipeline(parameters={"p": "NUMBER_INTEGER"}))

    assert run(path).exit_code == 0
    assert "SL601" in run(path, "--param", "p=three").output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a compiled pipeline"),
        (b"a: b\n", "it has no pipelineInfo, root, deploymentSpec"),
        (yaml.safe_dump_all([pipeline(), pipeline()]).encode(), "holds 2 YAML documents"),
        (b"kind: Workflow\nspec: {}\n", "is not a compiled pipeline but a Workflow"),
        (b"a: [b\n", "is not YAML: while parsing"),
        (b"caf\xe9", "is not UTF-8 text"),
        (b"a: &a [*a]", "line 1 has an alias, a tag or a value"),
        (b"[" * 100_000, "nested 200 times"),
        (RETRAIN.read_bytes()[:20_000].rpartition(b"\n")[0], "is it cut off?"),
        (b" " * 5_000_000, "has more than 4 MiB"),
        (yaml.safe_dump(pipeline(components=["a"])).encode(), r"must be in a dict which is \['a'\]"),
        (yaml.safe_dump(pipeline(components={1: {}})).encode(), "Failed to parse components field"),
        (yaml.safe_dump(pipeline(components={"c": []})).encode(), "components.c must be a mapping"),
        (yaml.safe_dump(pipeline(schemaVersion=2.1)).encode(), "Failed to parse schemaVersion field"),
        (yaml.safe_dump(pipeline(deploymentSpec={"executors": {"a": None}})).encode(), "executors field"),
        (yaml.safe_dump(pipeline(tasks=task(retryPolicy={"maxRetryCount": "n"}))).encode(), "maxRetryCount"),
        (yaml.safe_dump(pipeline(schemaVersion="2.2.0")).encode(), "has the schemaVersion 2.2.0, not 2.1.0"),
        (b"root: {}\nroot: {}\n", "the key 'root' is there twice, in line 2"),
    ],
)  # fmt: skip
def test_what_is_no_pipeline_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(content)
    found = run(path)

    assert found.exit_code == 2
    assert re.search(message, found.output)
    assert str(path) in found.output
    assert len(found.output.splitlines()) == 1


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "no pipeline" in run(tmp_path / "none.yaml").output
    assert "Is a directory" in run(tmp_path).output
    assert "/dev/zero is not a file" in run("/dev/zero").output
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is not a file" in run(tmp_path / "pipe").output
    assert "no settings file" in run(tmp_path / "none.toml").output
    assert run(tmp_path / "none.yaml").exit_code == 2


def test_compile_refuses_errors(tmp_path: Path) -> None:
    text = (ROOT / "settings" / "local.toml").read_text()
    settings, output = tmp_path / "s.toml", tmp_path / "p.yaml"
    settings.write_text(f'{text}[train.job]\ntimeout = "1h"\n')
    found = CliRunner().invoke(cli.main, ["compile", "--settings", str(settings), "--output", str(output)])

    assert found.exit_code == 2
    assert "timeout" in found.output
    assert not output.exists()


def test_checking_loads_neither_kfp_nor_the_vertex_client(tmp_path: Path) -> None:
    path = written(tmp_path / "p.yaml", BROKEN)
    program = (
        "import sys; from shardline.pipelines.cli.main import main\n"
        f"try: main(['check', {str(path)!r}])\n"
        "except SystemExit as end: assert end.code == 1, end.code\n"
        "heavy = {'kfp', 'tensorflow', 'keras', 'google.cloud.aiplatform', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_a_study_is_checked_as_a_study(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    text = (ROOT / "settings" / "tune.toml").read_text()
    file.write_text(text)
    assert run(file).output == f"{file}: nothing found\n"

    file.write_text(text.replace('goal = "maximize"', 'goal = "up"'))
    done = run(file)
    assert (done.exit_code, f"{file}: goal must be " in done.stderr) == (2, True), done.output
    file.write_text(text.replace("metric = ", "# metric = "))
    done = run(file)
    assert (done.exit_code, "metric" in done.stderr) == (2, True), done.output
