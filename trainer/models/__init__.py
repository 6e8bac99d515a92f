"""Models: built-in model functions, heads and label forms of a compiled model, saving and loading.

It may import `data` and what `data` may import. `zoo` is named in settings.
"""

from shardline.trainer.models.interface import (
    Heads,
    Interface,
    check_export,
    read_heads,
    read_interface,
    to_predictions,
    unwrap_single_label,
)
from shardline.trainer.models.saving import (
    METRICS_FILE,
    adapted_layers,
    load_model,
    read_recorded_heads,
    refresh_adapted,
    save_model,
    warm_start,
)

__all__ = [
    "METRICS_FILE",
    "Heads",
    "Interface",
    "adapted_layers",
    "check_export",
    "load_model",
    "read_heads",
    "read_interface",
    "read_recorded_heads",
    "refresh_adapted",
    "save_model",
    "to_predictions",
    "unwrap_single_label",
    "warm_start",
]
