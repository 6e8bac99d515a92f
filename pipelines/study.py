"""The study file: what a tuning pipeline searches, one TOML file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from shardline.components.tune.plan import check_tuned
from shardline.components.tune.study import read_study
from shardline.trainer.errors import SettingsError


def load_study(path: Path) -> str:
    """Reads and checks a study file; settings/tune.toml shows all of its keys.

    Returns:
        Its content as JSON, as the pipeline parameter "study" takes it.

    Raises:
        SettingsError: When the file is missing or no TOML, or says something that makes no study.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"no study file {path}; settings/tune.toml is one to start from") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read study file {path}: {error}") from None
    try:
        check_tuned(read_study(content).types, {})
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
    return json.dumps(content, ensure_ascii=False)
