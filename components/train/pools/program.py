"""The program of a replica as plain arguments, without a placeholder for the platform to fill in."""

from __future__ import annotations

import json
from typing import Any

from shardline.components.train.pools.texts import check_text


def program(image: str, module: str = "shardline.components.train.replica", **arguments: Any) -> dict[str, Any]:
    """Returns the container_spec that trains.

    Args:
        image: Container image.
        module: What a replica runs.
        **arguments: Its first argument, as JSON.

    Raises:
        SettingsError: When an argument holds what the platform would replace.
    """
    text = json.dumps(arguments, ensure_ascii=False)
    check_text("a parameter of the training", text)
    return {"image_uri": image, "command": ["python3", "-m", module], "args": [text]}
