"""Where on the platform things are done, and who said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.components.vertex import Platform
from shardline.pipelines.settings import NAMES, load_environment, read_environment
from shardline.trainer.base.errors import PlatformError, SettingsError

PLACE = {"project": "acme-vision", "location": "europe-west4"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "vertex.toml"
    path.write_text(
        '[vertex]\nproject = "from-file"\nlocation = "europe-west4"\ntags = { team = "vision" }\n'
    )
    return path


def test_variables_override_the_file_and_flags_override_both(file: Path) -> None:
    variables = {"VERTEX_LOCATION": "us-central1", "VERTEX_PIPELINE_ROOT": "gs://b/variable"}
    found = load_environment(file, {"location": "us-east1", "project": ""}, variables)

    given = ("from-file", "us-east1", "gs://b/variable")
    assert (found.project, found.location, found.pipeline_root) == given
    assert found.tags == {"team": "vision"}
    assert found.platform.parent == "projects/from-file/locations/us-east1"
    assert found.platform.host == "us-east1-aiplatform.googleapis.com"


def test_a_project_needs_no_option(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.rename(file.with_name("settings.toml")).parent)
    found = load_environment(None, {"location": "us-central1"}, {})

    assert (found.project, found.location, found.file) == ("from-file", "us-central1", Path("settings.toml"))


def test_tags_come_from_a_variable() -> None:
    found = load_environment(None, PLACE, {"VERTEX_TAGS": "team=vision, stage=test"})
    assert found.tags == {"team": "vision", "stage": "test"}


@pytest.mark.parametrize("name", ["project", "location", "registry", "pipeline_root"])
def test_what_is_missing_is_said_with_all_ways_to_give_it(name: str) -> None:
    given = {key: value for key, value in PLACE.items() if key != name}
    with pytest.raises(SettingsError, match=rf"{name} is missing.*\[vertex\].*VERTEX_{name.upper()}"):
        load_environment(None, given, {}, needed=(name,))


def test_a_registry_of_a_wrong_form_is_refused() -> None:
    variable = {"VERTEX_REGISTRY": "europe-west4-docker.pkg.dev/acme-vision/images"}
    with pytest.raises(SettingsError, match="registry must be a KFP repository"):
        load_environment(None, PLACE, variable)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[vertex]\nprojct = "p"\n', "unknown key vertex.projct; did you mean vertex.project?"),
        ("[vertex]\nproject = 3\n", "vertex.project must be text, got 3"),
        ('[vertex]\nfile = "b"\n', "unknown key vertex.file"),
        ("vertex = 3\n", "vertex must be a mapping with project, location"),
        ('[vertex]\nlocation = "europe-west4-a"\n', "location must be a region such as europe-west4"),
        ('[vertex]\npipeline_root = "s3://b/runs"\n', "pipeline_root must be gs://BUCKET/PATH, got 's3:"),
        ('[vertex]\nnetwork = "default"\n', "network must be projects/NUMBER/global/networks/NAME"),
        ('[vertex]\ntags = { Team = "x" }\n', "vertex.tags must be names and values of lower-case letters"),
        ("[vertex\n", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    # As `check` reads it, and every command that needs a platform.
    for read in (read_environment, lambda path: load_environment(path, PLACE, {})):
        with pytest.raises(SettingsError) as error:
            read(tmp_path / "a.toml")
        assert message in str(error.value)
        assert str(tmp_path / "a.toml") in str(error.value)


def test_the_example_says_where_on_the_platform() -> None:
    example = Path("settings/vertex.toml.example")
    assert read_environment(example)["registry"].endswith("-kfp.pkg.dev/my-project/pipelines")
    # Somebody's own has to be there before anything is done.
    with pytest.raises(SettingsError, match=r"my-project.*, where my-project is a placeholder"):
        load_environment(example, {}, {})
    given = {f"VERTEX_{name.upper()}": "" for name in NAMES} | {"VERTEX_PROJECT": "acme-vision"}
    with pytest.raises(SettingsError, match="pipeline_root is 'gs://my-bucket/pipelines'"):
        load_environment(example, {}, given)


def test_only_a_host_of_the_platform_gets_the_token() -> None:
    assert Platform("p", "us-central1").host == "us-central1-aiplatform.googleapis.com"
    for location in ("evil.com/", "europe west4", "evil.rep"):
        with pytest.raises(SettingsError, match="location must be a region"):
            _ = Platform("p", location).host
    with pytest.raises(PlatformError, match="is not a resource name"):
        Platform.of_resource("projects/p/locations/evil.com#/jobs/1")
