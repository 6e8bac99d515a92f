"""Where on the platform things are done, and who said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.components.vertex.client import HOSTS_VARIABLE, Platform, check_host
from shardline.pipelines.settings import NAMES, Environment, load_environment, variable_of
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

    assert (found.project, found.location, found.pipeline_root) == (
        "from-file",
        "us-east1",
        "gs://b/variable",
    )
    assert found.tags == {"team": "vision"}
    assert found.platform.parent == "projects/from-file/locations/us-east1"
    assert found.platform.host == "us-east1-aiplatform.googleapis.com"
    assert found.origins == {
        "project": str(file),
        "tags": str(file),
        "location": "--location",
        "pipeline_root": "VERTEX_PIPELINE_ROOT",
    }


def test_a_project_needs_no_option(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.rename(file.with_name("settings.toml")).parent)
    found = load_environment(None, {"location": "us-central1"}, {})

    assert (found.project, found.location, found.file) == ("from-file", "us-central1", Path("settings.toml"))


def test_tags_come_from_a_variable() -> None:
    variables = {"VERTEX_TAGS": "team=vision, stage=test", "VERTEX_API_ENDPOINT": "vertex.p.googleapis.com"}
    found = load_environment(None, PLACE, variables)
    assert found.tags == {"team": "vision", "stage": "test"}
    assert found.platform.host == "vertex.p.googleapis.com"


@pytest.mark.parametrize("name", ["project", "location"])
def test_what_is_missing_is_said_with_all_ways_to_give_it(name: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"{name} is missing.*\[vertex\].*VERTEX_{name.upper()}.*--{name}"
    ):
        load_environment(None, {key: value for key, value in PLACE.items() if key != name}, {})


def test_only_what_is_needed_must_be_given() -> None:
    with pytest.raises(SettingsError, match="registry is missing"):
        load_environment(None, PLACE, {}, needed=("registry",))
    with pytest.raises(SettingsError, match=r"pipeline_root is missing.*VERTEX_PIPELINE_ROOT"):
        load_environment(None, PLACE, {}, needed=("pipeline_root",))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("project", "My Project"),
        ("location", "europe"),
        ("pipeline_root", "my-bucket/runs"),
        ("service_account", "pipelines"),
        ("network", "projects/acme-vision/global/networks/default"),  # the API wants the number
        ("encryption_spec_key_name", "my-key"),
        ("registry", "europe-west4-docker.pkg.dev/acme-vision/images"),
        ("api_endpoint", "https://europe-west4-aiplatform.googleapis.com"),
        ("api_endpoint", "europe-west4-aiplatform.googleapis.com.evil.com"),
        ("tags", "Team=vision"),
    ],
)
def test_a_value_of_a_wrong_form_is_refused_with_its_origin(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_environment(None, PLACE if name not in PLACE else {}, _given(name, value))
    assert variable_of(name) in str(error.value)


def _given(name: str, value: str) -> dict[str, str]:
    return {variable_of(key): item for key, item in {**PLACE, name: value}.items()}


@pytest.mark.parametrize("project", ["acme-vision", "123456", "example.com:acme-vision"])
def test_projects_of_every_form(project: str) -> None:
    assert Environment(project=project, location="us-central1").platform.parent.startswith(
        f"projects/{project}/"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[vertex]\nprojct = "p"\n', "unknown key vertex.projct; did you mean vertex.project?"),
        ("[vertex]\nproject = 3\n", "vertex.project must be text, got 3"),
        ('[vertex]\norigins = { a = "b" }\n', "unknown key vertex.origins"),
        ("vertex = 3\n", "vertex must be a table"),
        ("[vertex\n", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(SettingsError) as error:
        load_environment(tmp_path / "a.toml", PLACE, {})
    assert message in str(error.value)
    assert str(tmp_path / "a.toml") in str(error.value)


def test_the_example_says_where_on_the_platform() -> None:
    example = Path("settings/vertex.toml.example")
    found = load_environment(example, {}, {}, needed=())
    assert found.project == "my-project"
    assert found.registry.endswith("-kfp.pkg.dev/my-project/pipelines")
    # Somebody's own has to be there before anything is done.
    with pytest.raises(
        SettingsError, match=r"my-project.* \(from .*example\), where my-project is a placeholder"
    ):
        load_environment(example, {}, {})
    given = {f"VERTEX_{name.upper()}": "" for name in NAMES} | {"VERTEX_PROJECT": "acme-vision"}
    with pytest.raises(SettingsError, match="pipeline_root is 'gs://my-bucket/pipelines'"):
        load_environment(example, {}, given)


def test_a_host_of_another_is_asked_only_where_the_environment_allows_it() -> None:
    """The settings say who gets the token of this account."""
    for host in (
        "vertex.p.googleapis.com",
        "us-central1-aiplatform.googleapis.com:443",
        "restricted.googleapis.com",
        "aiplatform.us-central1.rep.googleapis.com",
        "us-central1-aiplatform.mtls.googleapis.com",
        "aiplatform.us.rep.mtls.googleapis.com:443",
    ):
        check_host(host, {})
    with pytest.raises(SettingsError, match=r"SHARDLINE_ALLOWED_HOSTS=vertex\.internal allows it"):
        check_host("vertex.internal", {})
    check_host("vertex.internal", {HOSTS_VARIABLE: "other:1, vertex.internal"})
    for host in ("evil.rep.googleapis.com", "aiplatform.evil.com/.rep.googleapis.com", ""):
        with pytest.raises(SettingsError, match="is not a host of Vertex AI"):
            check_host(host, {HOSTS_VARIABLE: ""})
    with pytest.raises(SettingsError, match=r"is not a host of Vertex AI"):
        _ = Platform("p", "evil.com/").host
    with pytest.raises(PlatformError, match="is not a resource name"):
        Platform.of_resource("projects/p/locations/evil.com#/jobs/1")
