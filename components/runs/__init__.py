"""Runs on this machine and on Vertex AI: one value, `Run`, two readers of it, and causes of failures.

`RunDirectory` and `VertexRun` have the same methods: `read`, `explain`, `read_log`, `cancel`. It may import
`text` and `vertex`, and no component.
"""

from shardline.components.runs.causes import explain as explain
from shardline.components.runs.directory import RunDirectory as RunDirectory
from shardline.components.runs.directory import TaskLog as TaskLog
from shardline.components.runs.directory import on_platform as on_platform
from shardline.components.runs.mlflow_log import TrackingSettings as TrackingSettings
from shardline.components.runs.mlflow_log import log_run as log_run
from shardline.components.runs.run import Run as Run
from shardline.components.runs.run import RunState as RunState
from shardline.components.runs.vertex_run import VertexRun as VertexRun
