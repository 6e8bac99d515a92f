"""Registration of a blessed model."""

from __future__ import annotations

from pathlib import Path

from shardline.components.register.champion import champion_directory, current, publish
from shardline.trainer.progress import fact, say


def register_model(exported: Path, accuracy: float, champion_uri: str) -> None:
    """Makes an exported, blessed model the champion, where there is a place for one.

    Args:
        exported: Output directory of a validation that ended with a blessing.
        accuracy: On the test split, 0..1.
        champion_uri: Directory or gs://; "" publishes nothing.

    Raises:
        ModelError: When `exported` is incomplete or not blessed, or the present champion is damaged.
        SettingsError: When the champion's place cannot be reached or written to.
        RunError: When copying fails.
    """
    if not champion_uri:
        say("register", "champion_uri is empty: the blessed model is not published")
        return
    directory = champion_directory(champion_uri)
    previous = current(directory)
    published = publish(exported, directory, accuracy=accuracy)
    replaced = f", replacing {previous.version} (accuracy {previous.accuracy:.4f})" if previous else ""
    say("register", f"version {published.version} is the champion{replaced}")
    fact("champion", str(directory / published.path))
