"""The Terraform module in infrastructure/: formatted, valid where its provider is, its settings read."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shardline.pipelines.settings import load_environment, load_settings
from tests.helpers.markdown import ROOT

MODULE = ROOT / "infrastructure"
PROGRAM = shutil.which("terraform") or shutil.which("tofu") or ""


def terraform(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *words], cwd=directory, capture_output=True, text=True)


@pytest.mark.skipif(not PROGRAM, reason="neither terraform nor tofu is on the PATH")
def test_it_is_formatted_and_valid(tmp_path: Path) -> None:
    done = terraform(MODULE, "fmt", "-check", "-diff")
    assert done.returncode == 0, done.stdout + done.stderr

    shutil.copytree(MODULE, tmp_path, dirs_exist_ok=True)
    if terraform(tmp_path, "init", "-backend=false", "-input=false").returncode:
        pytest.skip("the provider cannot be installed here")
    done = terraform(tmp_path, "validate", "-no-color")
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_settings_are_ours(tmp_path: Path) -> None:
    text = (MODULE / "outputs.tf").read_text().partition("<<EOT\n")[2].partition("EOT\n")[0]
    accounts = re.sub(
        r"\$\{google_service_account\.(\w+)\.email}", r"\1@acme-vision.iam.gserviceaccount.com", text
    )
    settings = re.sub(r"\$\{var\.region}", "europe-west4", re.sub(r"\$\{google_[\w.]+}", "models", accounts))
    file = tmp_path / "settings.toml"
    machines = '[train]\nreplica_count = 2\nmachine_type = "n1-standard-8"\n'
    file.write_text(
        settings.replace("${var.project}", "acme-vision").replace("[train.job]", f"{machines}[train.job]")
    )

    environment = load_environment(file, {}, {})
    assert environment.pipeline_root == "gs://models/runs"
    assert environment.service_account.startswith("trainer@")
    assert load_settings(file).train.service_account.startswith("training@")
