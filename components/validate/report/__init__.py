"""The report on a validation and the model card, pages with plots. It may import `gate` and `metrics`."""

from shardline.components.validate.report.report import ModelCard, find_logs, make_card, render_report

__all__ = ["ModelCard", "find_logs", "make_card", "render_report"]
