"""The table [image]: what it may say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.pipelines.image.settings import ImageSettings
from shardline.pipelines.settings import load, load_image
from shardline.trainer.base.errors import SettingsError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name is empty"),
        ({"packages": ("",)}, 'packages holds ""'),
        ({"variant": "cuda"}, "variant is one of cpu, gpu, .*got 'cuda'"),
        # Both would be lines of a Dockerfile.
        ({"apt": ("libgl1; curl x",)}, "apt holds 'libgl1; curl x', which is not a Debian package"),
        ({"base": "python\nRUN curl x"}, "base is not the name of an image"),
        ({"user": "nobody"}, "user is a number, UID or UID:GID, got 'nobody'"),
    ],
)
def test_a_table_that_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ImageSettings(**{"name": "shardline:1", **changes})


def test_paths_are_the_settings_files() -> None:
    read = ImageSettings(
        name="shardline:1", packages=("../leafnet",), requirements="lock.txt", apt=("libgl1=1.6.0-1", "g++")
    )

    placed = read.below(Path("settings"))
    assert placed.packages == ("settings/../leafnet",)
    assert placed.requirements == "settings/lock.txt"
    assert ImageSettings(name="shardline:1").below(Path("settings")).requirements == ""


T4 = {"train.chief": "1 NVIDIA_TESLA_T4", "preprocess": ""}


@pytest.mark.parametrize(
    ("variant", "accelerators", "chosen"),
    [
        ("", {"train.chief": ""}, "cpu"),
        ("", T4, "gpu"),
        ("gpu", T4, "gpu"),
        ("gpu", {"preprocess": ""}, "gpu"),
        ("", {"preprocess": "1 NVIDIA_L4"}, "gpu"),
    ],
)
def test_the_variant_is_the_one_that_the_machines_need(
    variant: str, accelerators: dict[str, str], chosen: str
) -> None:
    assert ImageSettings(name="shardline:1", variant=variant).with_variant_for(accelerators).variant == chosen


@pytest.mark.parametrize(
    ("variant", "accelerators", "message"),
    [
        ("cpu", T4, 'train.chief has accelerators, 1 NVIDIA_TESLA_T4, .* write variant = "gpu"'),
        (
            "gpu",
            {"train.chief": "", "register": ""},
            r"no machine has accelerators \(train.chief, register\)",
        ),
        ("control", {"train.chief": ""}, "control has no TensorFlow"),
    ],
)
def test_a_variant_that_the_machines_cannot_use_is_refused(
    variant: str, accelerators: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        ImageSettings(name="shardline:1", variant=variant).with_variant_for(accelerators)


def test_settings_are_refused_with_an_image_that_their_machines_cannot_use(tmp_path: Path) -> None:
    path = tmp_path / "vertex.toml"
    text = """
        [image]
        name = "shardline:1"
        variant = "cpu"
        [train]
        replica_count = 2
        machine_type = "n1-standard-8"
        [train.workers]
        accelerator_type = "NVIDIA_TESLA_T4"
        accelerator_count = 1
    """
    path.write_text(text)

    with pytest.raises(SettingsError, match=r"train\.workers has accelerators, 1 NVIDIA_TESLA_T4"):
        load(path)
    path.write_text(text.replace('"n1-standard-8"', '"n1-standard-8"\nimage_uri = "other:1"'))
    load(path)


@pytest.mark.parametrize("text", ['image = "{}"', '[image]\nname = "{}"'])
def test_the_platform_is_given_the_digest_and_the_next_build_the_tag(tmp_path: Path, text: str) -> None:
    digest = f"sha256:{64 * 'a'}"
    path = tmp_path / "vertex.toml"
    train = '[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n'
    path.write_text(f"{text.format(f'localhost:5000/leafnet:1@{digest}')}\n{train}")

    image = load_image(path)
    assert load(path).image == f"localhost:5000/leafnet@{digest}"
    assert image is not None
    assert image.name == f"localhost:5000/leafnet:1@{digest}"
