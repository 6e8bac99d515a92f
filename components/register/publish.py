"""Registration of a blessed model as the champion."""

from __future__ import annotations

from pathlib import Path

from shardline.components import champions
from shardline.trainer.errors import ModelError
from shardline.trainer.progress import fact, say


def register_model(exported: Path, quality: str, champion_uri: str, run: str = "") -> None:
    """Makes an exported, blessed model the champion; champion_uri "" publishes nothing.

    Repeated in the same `run`, it publishes once.

    Raises:
        ModelError: When `exported` is incomplete or not blessed, the present champion is damaged, or is no
            longer the one that the model was judged against.
        SettingsError, PlatformError: When the champion's place cannot be reached or written to.
        RunError: When copying fails.
    """
    if not champion_uri:
        say("register", "champion_uri is empty: the blessed model is not published")
        return
    champions.refuse_container("champion_uri", champion_uri)
    try:
        published = champions.publish(exported, champion_uri, quality=quality, run=run)
    except ModelError as error:
        raise ModelError(f"{error}; an endpoint to which this run has deployed it serves it") from error
    now = champions.require_current(champion_uri).version
    if now != published.version:
        how = f"was the champion, {now} is so since"
    elif published.commit.replaced:
        how = f"is the champion, replacing {published.commit.replaced}"
    else:
        how = "is the champion"
    say("register", f"version {published.version} {how}")
    fact("champion", champions.where(champion_uri, published.version))
