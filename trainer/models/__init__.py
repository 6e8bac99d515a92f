"""Models: built-in model functions, heads and label forms of a compiled model, saving and loading.

It may import `data` and what `data` may import. `zoo` is named in settings.
"""

from shardline.trainer.models.interface import Heads as Heads
from shardline.trainer.models.interface import Interface as Interface
from shardline.trainer.models.interface import check_export as check_export
from shardline.trainer.models.interface import read_heads as read_heads
from shardline.trainer.models.interface import read_interface as read_interface
from shardline.trainer.models.interface import to_predictions as to_predictions
from shardline.trainer.models.interface import unwrap_single_label as unwrap_single_label
from shardline.trainer.models.saving import METRICS_FILE as METRICS_FILE
from shardline.trainer.models.saving import adapted_layers as adapted_layers
from shardline.trainer.models.saving import load_model as load_model
from shardline.trainer.models.saving import read_recorded_heads as read_recorded_heads
from shardline.trainer.models.saving import refresh_adapted as refresh_adapted
from shardline.trainer.models.saving import save_model as save_model
from shardline.trainer.models.saving import warm_start as warm_start
