"""The table [image]: what it may say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.pipelines.image.settings import ImageSettings
from shardline.trainer.errors import SettingsError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name is empty"),
        ({"packages": ("",)}, 'packages holds ""'),
        ({"variant": "cuda"}, "variant is one of cpu, gpu, .*got 'cuda'"),
        # Both would be lines of a Dockerfile.
        ({"apt": ("libgl1; curl x",)}, "apt holds 'libgl1; curl x', which is no Debian package"),
        ({"base": "python\nRUN curl x"}, "base is no name of an image"),
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
