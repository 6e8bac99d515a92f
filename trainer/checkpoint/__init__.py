"""Checkpoints: a run's training state, its files, and its identity when it resumes.

It may import `distribute` and what `distribute` may import.
"""

from shardline.trainer.checkpoint.state import BEGINNING as BEGINNING
from shardline.trainer.checkpoint.state import Position as Position
from shardline.trainer.checkpoint.state import Snapshot as Snapshot
from shardline.trainer.checkpoint.state import TrainingState as TrainingState
from shardline.trainer.checkpoint.state import finite_variables as finite_variables
from shardline.trainer.checkpoint.state import restore_model as restore_model
from shardline.trainer.checkpoint.store import Checkpoints as Checkpoints
from shardline.trainer.checkpoint.store import Identity as Identity
from shardline.trainer.checkpoint.store import IdentityRecord as IdentityRecord
from shardline.trainer.checkpoint.store import check_model_dir as check_model_dir
from shardline.trainer.checkpoint.store import format_rate as format_rate
