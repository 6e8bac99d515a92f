"""`shardline new --terraform`: the module holds against the provider's schema, and fits settings and docs.

Where there is a terraform or tofu, it applies the module with a provider made of the same schema. What the
schema does not say is not checked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardline.pipelines.cli.main import main
from shardline.pipelines.project import new
from shardline.pipelines.remote import doctor
from shardline.pipelines.remote.doctor import _APIS
from shardline.pipelines.settings import Environment, Settings, load, load_environment
from shardline.trainer.base.errors import SettingsError
from tests.helpers import terraform
from tests.helpers.markdown import ROOT, blocks
from tests.helpers.terraform_provider import google_provider
from tests.helpers.terraform_schema import FILE

TEMPLATE = ROOT / "pipelines" / "project" / "template" / "terraform" / "infrastructure"
PAGE = ROOT / "docs" / "vertex.md"
PROGRAM = shutil.which("terraform") or shutil.which("tofu")
#: What the expressions of the settings are, in a project that was applied with all options.
VALUES: dict[str, Any] = {
    "var.region": "europe-west4",
    "var.project": "acme-vision",
    "google_artifact_registry_repository.image.repository_id": "shardline",
    "google_artifact_registry_repository.pipelines.repository_id": "pipelines",
    "google_storage_bucket.pipelines.name": "acme-models",
    "google_service_account.trainer.email": "trainer@acme-vision.iam.gserviceaccount.com",
    "google_service_account.training.email": "training@acme-vision.iam.gserviceaccount.com",
    "var.alerts": True,
    'var.alerts || contains(var.secrets, "webhook")': True,
    'contains(var.secrets, "webhook")': True,
    'var.mlflow_uri != ""': True,
    'var.mlflow_uri != "" && contains(var.secrets, "mlflow")': True,
    "var.mlflow_uri": "https://mlflow.acme.example",
    "google_pubsub_topic.alerts[0].id": "projects/acme-vision/topics/shardline-alerts",
    'google_secret_manager_secret.secrets["webhook"].id': "projects/acme-vision/secrets/shardline-webhook",
    'google_secret_manager_secret.secrets["mlflow"].id': "projects/acme-vision/secrets/shardline-mlflow",
}
#: The variables with which that is made.
VARIABLES: dict[str, Any] = {
    "project": "acme-vision",
    "bucket": "acme-models",
    "submitters": ["user:ada@acme.example", "group:vision@acme.example"],
    "runs_days": 90,
    "alerts": True,
    "mlflow_uri": "https://mlflow.acme.example",
    "secrets": ["webhook", "mlflow"],
}

needs_program = pytest.mark.skipif(PROGRAM is None, reason="neither terraform nor tofu is on the PATH")


@pytest.fixture(scope="module")
def module() -> terraform.Module:
    return terraform.read(TEMPLATE)


def shardline(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_every_resource_is_as_the_schema_of_the_provider_says(module: terraform.Module) -> None:
    assert len(terraform.resources(module)) > 20
    assert terraform.faults(module) == []
    used = {address.partition(".")[0] for address in terraform.resources(module)}
    assert used == set(terraform.SCHEMA), "the schema holds what is used"


def test_the_module_asks_for_the_release_whose_schema_that_is(module: terraform.Module) -> None:
    asked = module["terraform"]["required_providers"][0]["google"]
    provider = json.loads(FILE.read_text())["provider"]

    assert f"{asked['source']} {asked['version'].removeprefix('~> ')}.0" == provider


@pytest.mark.parametrize(
    ("old", "changed", "fault"),
    [
        ("uniform_bucket_level_access", "uniform_access", "uniform_access is unknown"),
        ('resource "google_storage_bucket" ', 'resource "google_bucket" ', "no resource google_bucket"),
        ('  format        = "KFP"\n', "", "format is missing"),
        ('      type = "Delete"\n', "", "lifecycle_rule.action.type is missing"),
        ("versioning {", "version {", "version is unknown"),
        ("    enabled = true", '    enabled = "yes"', "versioning.enabled is 'yes', no bool"),
        ("  versioning {\n    enabled = true\n  }", "  versioning = true", "versioning is a block"),
        ('public_access_prevention    = "enforced"', "public_access_prevention {}", "is no block"),
        ("google_service_account.trainer.member", "google_service_account.runs.member", "runs is not there"),
        ("google_service_account.trainer.member", "google_service_account.trainer.mail", "no attribute mail"),
        ("google_pubsub_topic.alerts[0]", "google_pubsub_topic.alerts", "lacks an index"),
        ("var.bucket", "var.buckets", "var.buckets is not there"),
        ("var.untagged_days", "180", "var.untagged_days: nothing uses it"),
        ("  for_each           = var.submitters\n", "", "each.value without for_each"),
        ("matches_prefix", "prefixes", "lifecycle_rule.condition.prefixes is unknown"),
    ],
)
def test_a_mistake_is_found(tmp_path: Path, old: str, changed: str, fault: str) -> None:
    found = 0
    for file in TEMPLATE.glob("*.tf"):
        text = file.read_text()
        found += text.count(old)
        (tmp_path / file.name).write_text(text.replace(old, changed))

    assert found, f"the module has no {old!r}"
    assert any(fault in text for text in terraform.faults(terraform.read(tmp_path)))


@needs_program
def test_it_has_the_format_of_terraform() -> None:
    done = subprocess.run(
        [str(PROGRAM), "fmt", "-check", "-diff", "-recursive", str(TEMPLATE)], capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (0, "")


def test_every_resource_says_why_it_is_there() -> None:
    for file in TEMPLATE.glob("*.tf"):
        lines = file.read_text().splitlines()
        for before, line in pairwise(lines):
            assert not line.startswith("resource ") or before.startswith("#"), f"{file.name}: {line}"


def granted(commands: str) -> set[tuple[str, str, str]]:
    """Returns what gcloud lines grant, in the form of `terraform.grants`."""
    roles = re.search(r"for ROLE in (.+?);", commands)
    found = {("trainer", f"roles/{role}", "project") for role in roles[1].split()} if roles else set()
    for line in commands.replace("\\\n", " ").splitlines():
        scope = re.search(r"gcloud ([\w -]+?)s? add-iam-policy-binding", line)
        if scope and (role := re.search(r"--role=(roles/[\w.]+)", line)):
            account = re.search(r"--member=serviceAccount:\$(\w+)", line)
            assert account
            kind = {
                "storage bucket": "storage_bucket",
                "artifacts repositorie": "artifact_registry_repository",
            }
            name = kind.get(scope[1], scope[1].removeprefix("iam ").replace("-", "_"))
            found.add((account[1].lower(), role[1], name))
    return found


def test_it_grants_what_the_page_grants(module: terraform.Module) -> None:
    by_hand = granted("\n".join(blocks(PAGE, "sh")))
    # Rows "if ... also grant" of options of the module.
    options = {
        ("trainer", "roles/secretmanager.secretAccessor", "secret_manager_secret"),
        ("training", "roles/secretmanager.secretAccessor", "secret_manager_secret"),
        ("trainer", "roles/pubsub.publisher", "pubsub_topic"),
    }
    accounts = {grant for grant in terraform.grants(module) if grant[0] != "submitters"}

    assert len(by_hand) == 10
    assert accounts - options == by_hand
    rows = PAGE.read_text().partition("| if | also grant |")[2].partition("\n\n")[0]
    for account, role, _ in options:
        assert any(f"`{account}`" in row and role[6:] in row for row in rows.splitlines()), (account, role)


def test_people_have_the_roles_of_their_commands(module: terraform.Module) -> None:
    rows = PAGE.read_text().partition("| command | role |")[2].partition("\n\n")[0].splitlines()
    commands = ("submit", "logs", "upload", "champion", "cancel")
    wanted = {
        f"roles/{role}"
        for row in rows
        if any(row.startswith(f"| `{command}`") for command in commands)
        for role in re.findall(r"`(\w+\.\w+)`", row.rpartition(" | ")[2])
    } - {"roles/aiplatform.viewer"}  # which aiplatform.user includes

    assert {role for account, role, _ in terraform.grants(module) if account == "submitters"} == wanted


def test_its_apis_are_those_of_the_page_and_of_doctor(module: terraform.Module) -> None:
    always, _, _ = module["google_project_service.apis"]["for_each"].partition("],")
    apis = set(re.findall(r'"(\w+)"', always))
    page = "\n".join(blocks(PAGE, "sh")).partition("services enable")[2].partition("\n\n")[0]

    assert apis == {
        name.removesuffix(".googleapis.com") for name in re.findall(r"\w+\.googleapis\.com", page)
    }
    assert set(_APIS) <= apis


def test_training_writes_only_where_runs_are_and_nothing_else_has_an_age(module: terraform.Module) -> None:
    condition = module["google_storage_bucket_iam_member.training_runs"]["condition"][0]["expression"]
    aged = module["google_storage_bucket.pipelines"]["dynamic"][0]["lifecycle_rule"]["content"][0]

    assert condition == 'resource.name.startsWith("projects/_/buckets/${var.bucket}/objects/runs/")'
    assert aged["condition"][0]["matches_prefix"] == ["runs/"]
    assert module["var.runs_days"]["default"] is None
    others = module["google_storage_bucket.pipelines"]["lifecycle_rule"]
    assert [list(rule["condition"][0])[:-1] for rule in others] == [["days_since_noncurrent_time"]]
    assert 'gs://${google_storage_bucket.pipelines.name}/runs"' in module["output.settings"]["value"]


def settings_of(project: Path, values: dict[str, Any]) -> tuple[Settings, Environment]:
    """Returns the settings that a project has of its module's output."""
    module = terraform.read(project / "infrastructure")
    path = project / "settings.toml"
    path.write_text(terraform.render(module["output.settings"]["value"], values))
    return load(path), load_environment(path, {}, {})


def test_its_output_is_the_settings_of_the_project(tmp_path: Path) -> None:
    new.write(tmp_path, "text", "leafnet", "shardline")
    new.add_terraform(tmp_path, "leafnet")
    settings, environment = settings_of(tmp_path, VALUES)

    assert settings.image == "europe-west4-docker.pkg.dev/acme-vision/shardline/leafnet:0.1.0"
    assert settings.build is not None
    assert [Path(package).name for package in settings.build.packages] == ["leafnet"]
    assert settings.train.service_account == VALUES["google_service_account.training.email"]
    assert environment.service_account == VALUES["google_service_account.trainer.email"]
    assert environment.pipeline_root == "gs://acme-models/runs"
    assert environment.registry == "https://europe-west4-kfp.pkg.dev/acme-vision/pipelines"
    assert settings.notify.webhook_secret == "projects/acme-vision/secrets/shardline-webhook/versions/latest"
    assert settings.notify.topic == "projects/acme-vision/topics/shardline-alerts"
    assert settings.tracking is not None
    assert settings.tracking.token_secret == "projects/acme-vision/secrets/shardline-mlflow/versions/latest"


def test_without_options_its_output_has_neither_notification_nor_tracking(tmp_path: Path) -> None:
    new.write(tmp_path, "text", "leafnet", "shardline")
    new.add_terraform(tmp_path, "leafnet")
    options = {name: False for name, value in VALUES.items() if value is True}
    settings, _ = settings_of(tmp_path, {**VALUES, **options})

    assert (settings.notify.webhook_secret, settings.notify.topic) == ("", "")
    assert not settings.tracking.mlflow_uri


def applied(directory: Path, variables: dict[str, Any]) -> tuple[set[str], str]:
    """Applies a module; returns the addresses of its resources, and the settings or what was refused."""
    (directory / "cli.tfrc").touch()
    (directory / "x.auto.tfvars.json").write_text(json.dumps(variables))
    with google_provider() as variables_of_provider:
        environ = {**os.environ, **variables_of_provider, "TF_CLI_CONFIG_FILE": str(directory / "cli.tfrc")}

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            command = [str(PROGRAM), *words]
            return subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True)

        for words in (["init", "-input=false"], ["apply", "-input=false", "-auto-approve"]):
            if (done := run(*words, "-no-color")).returncode:
                return set(), done.stderr
        return set(run("state", "list").stdout.splitlines()), run("output", "-raw", "settings").stdout


@needs_program
@pytest.mark.parametrize("all_options", [True, False])
def test_terraform_applies_it_and_its_output_is_that(tmp_path: Path, all_options: bool) -> None:
    shutil.copytree(TEMPLATE, tmp_path, dirs_exist_ok=True)
    module = terraform.read(TEMPLATE)
    values = VALUES if all_options else {**VALUES, **{key: False for key in VALUES if VALUES[key] is True}}
    needed = {name: VARIABLES[name] for name in ("project", "bucket")}

    addresses, output = applied(tmp_path, VARIABLES if all_options else needed)

    assert output == terraform.render(module["output.settings"]["value"], values)
    assert 'google_project_iam_member.trainer["roles/aiplatform.user"]' in addresses
    made = {address.partition("[")[0] for address in addresses}
    assert (
        made == set(terraform.resources(module)) if all_options else made < set(terraform.resources(module))
    )


@needs_program
@pytest.mark.parametrize(
    ("old", "changed", "words"),
    [
        ("uniform_bucket_level_access", "uniform_access", "Unsupported argument"),
        ('  format        = "KFP"\n', "", "Missing required argument"),
        ("alerts[0].name", "alerts.name", "Missing resource instance key"),
        ("var.runs_days == null ? [] : [var.runs_days]", "var.runs_days", "Invalid dynamic for_each value"),
    ],
)
def test_terraform_refuses_a_mistake(tmp_path: Path, old: str, changed: str, words: str) -> None:
    for file in TEMPLATE.glob("*.tf"):
        (tmp_path / file.name).write_text(file.read_text().replace(old, changed))

    assert words in applied(tmp_path, VARIABLES)[1]


@needs_program
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"bucket": "gs://acme-models"}, "without gs://"),
        ({"prefix": "Test-"}, "lower-case letters"),
        ({"secrets": ["slack"]}, "Only webhook and mlflow"),
        ({"runs_days": "soon"}, "number"),
    ],
)
def test_terraform_refuses_variables_that_cannot_be(
    tmp_path: Path, variables: dict[str, Any], words: str
) -> None:
    shutil.copytree(TEMPLATE, tmp_path, dirs_exist_ok=True)
    addresses, refused = applied(tmp_path, {**VARIABLES, **variables})

    assert not addresses
    assert words in " ".join(re.sub("[│╷╵]", "", refused).split())


def test_the_resources_that_doctor_names_are_there(module: terraform.Module) -> None:
    named = set(re.findall(r'_or_apply\("(\w+\.\w+)"\)', Path(doctor.__file__).read_text()))

    assert len(named) == 6
    assert all(address in module for address in named)


def test_a_new_project_has_it_only_if_asked(tmp_path: Path) -> None:
    done = shardline("new", tmp_path / "leafnet", "--kind", "text", "--terraform")
    plain = shardline("new", tmp_path / "other", "--kind", "text", "--name", "leafnet")

    assert (done.exit_code, plain.exit_code) == (0, 0)
    assert "infrastructure/main.tf" in done.output.splitlines()
    written = tmp_path / "leafnet" / "infrastructure"
    texts = [file.read_text() for file in written.iterdir()]
    assert (written / ".gitignore").is_file()
    assert not [text for text in texts if "my_package" in text or re.search("@[A-Z]+@", text)]
    assert not (tmp_path / "other" / "infrastructure").exists()


def test_a_project_that_is_there_gets_it_and_nothing_else(tmp_path: Path) -> None:
    new.write(tmp_path, "text", "leafnet", "shardline")
    (tmp_path / "Makefile").write_text("# mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    wrong = shardline("new", tmp_path, "--terraform", "--name", "leaf")
    assert (wrong.exit_code, "has no package leaf;" in wrong.output) == (2, True)
    done = shardline("new", tmp_path, "--terraform", "--name", "leafnet")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].strip() == "terraform apply"

    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    added = {path.relative_to(tmp_path).parts[0] for path in after.keys() - before.keys()}
    assert added == {"infrastructure"}
    assert before.items() <= after.items()
    again = shardline("new", tmp_path, "--terraform", "--name", "leafnet")
    assert (again.exit_code, "infrastructure exists" in again.output) == (2, True)


@pytest.mark.parametrize("more", [["--kind", "text"], []])
def test_a_directory_that_is_no_project_gets_nothing(tmp_path: Path, more: list[str]) -> None:
    (tmp_path / ("settings.toml" if more else "notes.txt")).touch()
    (tmp_path / "leafnet").mkdir()

    done = shardline("new", tmp_path, "--terraform", "--name", "leafnet", *more)

    assert (done.exit_code, "is not empty" in done.output) == (2, True)
    assert not (tmp_path / "infrastructure").exists()


@pytest.mark.parametrize("name", ["../x", "", "infrastructure"])
def test_a_name_that_is_no_package_of_the_project_is_refused(tmp_path: Path, name: str) -> None:
    new.write(tmp_path / "a", "text", "leafnet", "shardline")
    (tmp_path / "x").mkdir()

    with pytest.raises(SettingsError, match="--name"):
        new.add_terraform(tmp_path / "a", name)
