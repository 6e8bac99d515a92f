"""Pipelines in the registry: `shardline upload`, and runs of what is there, with KFP's own client."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from google.rpc import code_pb2

from shardline.pipelines.cli.main import main
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex
from tests.helpers.checks import pipeline

pytestmark = pytest.mark.timeout(120)

REGISTRY = f"https://{LOCATION}-kfp.pkg.dev/{PROJECT}/pipelines"
PACKAGE = f"projects/{PROJECT}/locations/{LOCATION}/repositories/pipelines/packages/toy"
WRITING = ("UploadPipeline", "CreateTag", "UpdateTag", "DeleteTag")


@pytest.fixture
def fake(vertex_environ: FakeVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    monkeypatch.setenv("VERTEX_REGISTRY", REGISTRY)
    monkeypatch.chdir(tmp_path)
    write("one")
    yield vertex_environ
    assert vertex_environ.refused == []


def write(description: str) -> str:
    """Writes pipeline.yaml and returns its version."""
    spec = pipeline(pipelineInfo={"name": "toy", "description": description}, sdkVersion="kfp-2.17.0")
    Path("pipeline.yaml").write_text(yaml.safe_dump(spec))
    return f"sha256:{hashlib.sha256(Path('pipeline.yaml').read_bytes()).hexdigest()}"


def shardline(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def upload(*arguments: str) -> dict[str, Any]:
    """Uploads pipeline.yaml and returns what --json says."""
    done = shardline("upload", "pipeline.yaml", "--json", *arguments)
    assert done.exit_code == 0, done.output
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def written(fake: FakeVertex) -> list[str]:
    """Returns the calls that change something, and forgets all."""
    calls = [name for name in fake.services.calls if name in WRITING]
    fake.services.calls.clear()
    return calls


def tags(fake: FakeVertex) -> dict[str, str]:
    return fake.services.registry.packages[PACKAGE].tags


def test_a_pipeline_is_uploaded_once_and_its_tags_move(fake: FakeVertex) -> None:
    first = write("one")
    uploaded = upload("--tag", "latest", "--tag", "v1")
    assert re.fullmatch(r"this file \(sha256 \w{12}\) has not run here, in runs", uploaded.pop("proof"))
    assert uploaded == {
        "registry": REGISTRY,
        "package": "toy",
        "version": first,
        "is_new": True,
        "url": f"{REGISTRY}/toy/{first}",
    }
    assert written(fake) == ["UploadPipeline", *2 * ["UpdateTag", "CreateTag"]]

    said = shardline("upload", "pipeline.yaml", "--tag", "latest").stdout
    there = f"already in the registry: {REGISTRY}/toy/{first}"
    assert said.startswith(f"{there}\ntag latest points to it\nproof: ")
    assert written(fake) == ["UpdateTag"]

    second = write("two")
    assert upload("--tag", "latest")["is_new"]
    assert written(fake) == ["UploadPipeline", "UpdateTag"]
    assert tags(fake) == {"latest": second, "v1": first}

    # Back to the first: nothing is uploaded.
    write("one")
    assert not upload("--tag", "latest")["is_new"]
    assert written(fake) == ["UpdateTag"]
    assert tags(fake) == {"latest": first, "v1": first}


def test_what_is_not_proven_is_not_sent(fake: FakeVertex) -> None:
    assert shardline("upload", "pipeline.yaml", "--proven").exit_code == 2
    assert fake.services.calls == []


@pytest.mark.parametrize("tag", ["Latest", "sha256:1"])
def test_mistakes_are_found_before_anything_is_sent(fake: FakeVertex, tag: str) -> None:
    done = shardline("upload", "pipeline.yaml", "--tag", tag)
    assert (done.exit_code, f"got '{tag}'" in done.stderr) == (2, True)
    assert fake.services.calls == []


def test_the_registry_is_all_that_it_needs(fake: FakeVertex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERTEX_REGISTRY")
    done = shardline("upload", "pipeline.yaml")
    assert done.exit_code == 2
    assert "registry is missing" in done.stderr
    assert "VERTEX_REGISTRY" in done.stderr


def test_a_tag_that_could_not_be_moved_is_moved_when_it_is_done_again(fake: FakeVertex) -> None:
    first = write("one")
    upload("--tag", "latest")
    second = write("two")
    fake.services.fail("UpdateTag", code_pb2.PERMISSION_DENIED)
    done = shardline("upload", "pipeline.yaml", "--tag", "latest")
    assert done.exit_code == 3
    assert "cannot set the tag latest: permission artifactregistry.tags.update is missing" in done.stderr
    assert "grant roles/artifactregistry.writer" in done.stderr
    assert tags(fake) == {"latest": first}

    assert (upload("--tag", "latest")["is_new"], tags(fake)) == (False, {"latest": second})


def test_a_run_is_of_exactly_the_version_that_a_tag_meant(
    fake: FakeVertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = write("one")
    upload("--tag", "latest")
    place = {"VERTEX_PROJECT": PROJECT, "VERTEX_LOCATION": LOCATION, "VERTEX_PIPELINE_ROOT": f"gs://{BUCKET}"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for address in (f"{REGISTRY}/toy/latest", f"{REGISTRY}/toy/{version}"):
        done = shardline("submit", address, "--wait", "--json")
        assert done.exit_code == 0, done.output
    jobs = list(fake.services.pipeline_jobs.values())
    assert [job.template_uri for job in jobs] == [f"{REGISTRY}/toy/{version}"] * 2
    assert [job.pipeline_spec["pipelineInfo"]["description"] for job in jobs] == ["one", "one"]

    for address, message in (
        (f"{REGISTRY}/toy/nope", "has no toy with the tag 'nope'"),
        (f"{REGISTRY}/nobody/latest", "has no nobody with the tag 'latest'"),
        ("https://example.com/pipeline.yaml", "is not the URL of a pipeline in a registry"),
    ):
        done = shardline("submit", address)
        assert done.exit_code == 2
        assert message in done.stderr
    (package,) = fake.services.registry.packages.values()
    package.versions[version] += b"# exchanged"
    done = shardline("submit", f"{REGISTRY}/toy/latest")
    assert done.exit_code == 3
    assert "it was damaged or replaced; upload it again" in done.stderr
    done = shardline("submit", f"{REGISTRY}/toy/sha256:{'0' * 64}")
    assert done.exit_code == 3
    assert "not found" in done.stderr
