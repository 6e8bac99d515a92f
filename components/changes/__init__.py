"""The first task of a run: it checks the parameters and detects changes since the last run.

It may import the settings of the components that follow, the sources, and `model_store`.
"""

from shardline.components.changes.detection import (
    detect_changes,
    fill_in_date,
    fingerprint,
    in_zone,
    plugins_of,
    read_settings,
    record_dataset,
    write_history,
)

__all__ = [
    "detect_changes",
    "fill_in_date",
    "fingerprint",
    "in_zone",
    "plugins_of",
    "read_settings",
    "record_dataset",
    "write_history",
]
