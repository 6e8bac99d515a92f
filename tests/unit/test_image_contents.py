"""What the image holds, as its settings say, and the plug-ins that a run would look for in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.components.configure.fingerprint import plugins_of
from shardline.pipelines.image.contents import missing_from_image
from shardline.pipelines.image.settings import ImageSettings


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package, a project with its package in src, and requirements."""
    for name in ("leafnet/__init__.py", "leafnet/source.py", "leafnet/nets/small.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("class Leaves: ...\ndef build(hparams): ...\n")
    (tmp_path / "heavy" / "src" / "heavynet").mkdir(parents=True)
    (tmp_path / "heavy" / "pyproject.toml").touch()
    (tmp_path / "heavy" / "src" / "heavynet" / "ops.cpython-311-x86_64-linux-gnu.so").touch()
    (tmp_path / "requirements.txt").write_text("our_nets==1.0 \\\n    --hash=sha256:00\nPyYAML==6.0\n")
    return tmp_path


def image(project: Path, *packages: str, **changes: str) -> ImageSettings:
    return ImageSettings(name="shardline:1", packages=packages, **changes).below(project)


@pytest.mark.parametrize(
    "module",
    [
        "leafnet.source",
        "leafnet.nets.small",
        # Without an __init__.py.
        "leafnet.nets",
        "heavynet.ops",
        "shardline.trainer.models.zoo",
        # Of the image's own packages, and one that is called otherwise than its distribution.
        "tensorflow_datasets.core",
        "google.protobuf",
        "collections",
    ],
)
def test_it_has_what_is_named_and_what_shardline_needs(project: Path, module: str) -> None:
    assert missing_from_image(image(project, "leafnet", "heavy"), {"source": f"{module}:Leaves"}) == []


def test_a_module_that_is_in_no_image_is_refused_with_what_to_do(project: Path) -> None:
    (line,) = missing_from_image(image(project), {"source": "leafnet.source:Leaves", "model": "resnet50"})

    assert line == (
        "source=leafnet.source:Leaves: the image shardline:1 has no module leafnet; add its directory to the "
        'settings, [image] packages = ["../leafnet"] (a path from the settings file), or its distribution to '
        "[image] requirements, and build the image again"
    )


def test_a_module_that_the_package_does_not_have_is_refused(project: Path) -> None:
    (line,) = missing_from_image(image(project, "leafnet"), {"source": "leafnet.sorce:Leaves"})

    assert line.endswith(
        "leafnet in packages of [image] has no module leafnet.sorce; name one of its modules"
    )


def test_a_name_that_the_module_does_not_have_is_refused(project: Path) -> None:
    given = {"source": "leafnet.source:Leafs", "model": "leafnet.source:build"}
    (line,) = missing_from_image(image(project, "leafnet"), given)

    assert (
        line == "unknown source 'leafnet.source:Leafs': leafnet.source has no 'Leafs', it has Leaves, build"
    )


def test_a_distribution_has_its_modules(project: Path) -> None:
    """By its name, by what is installed here, and of one that is not installed here nobody knows."""
    with_it = image(project, requirements="requirements.txt")

    assert missing_from_image(with_it, {"model": "our_nets:build"}) == []
    assert missing_from_image(with_it, {"model": "yaml:build"}) == []
    assert missing_from_image(with_it, {"model": "ournets:build"}) == []
    (project / "requirements.txt").write_text("PyYAML==6.0\n")
    assert len(missing_from_image(with_it, {"model": "ournets:build"})) == 1


def test_a_package_that_is_not_on_this_machine_is_taken_at_its_name(project: Path) -> None:
    there = image(project, "elsewhere/leafnet")

    assert missing_from_image(there, {"model": "leafnet.model:build"}) == []
    assert len(missing_from_image(there, {"model": "other.model:build"})) == 1


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({}, {}),
        ({"model": "keras:MobileNet", "source": "images:gs://b/photos"}, {}),
        ({"source": "digits"}, {}),
        ({"source": "digits:Ours"}, {"source": "digits:Ours"}),
        # Their own checks say what is wrong with these.
        ({"model": "resnet51", "source": 3, "train_options": "augment"}, {}),
        (
            {
                "model": "a:m",
                "source": "b:S",
                "train_options": {"augment": "c:f", "transform": "d:f", "callbacks": ["e:make"]},
            },
            {
                "model": "a:m",
                "source": "b:S",
                "train_options.augment": "c:f",
                "train_options.transform": "d:f",
                "train_options.callbacks[0]": "e:make",
            },
        ),
    ],
)
def test_plugins_of_a_run(parameters: dict[str, Any], found: dict[str, str]) -> None:
    assert plugins_of(parameters) == found
