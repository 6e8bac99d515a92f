"""The last task of a run, which runs however the run ended: it records the outcome and notifies.

It may import `model_store`, `runs` and `vertex`, and no other component.
"""

from shardline.components.exit_handler.notification import NotifySettings, finish_run

__all__ = ["NotifySettings", "finish_run"]
