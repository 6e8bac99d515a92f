"""Validation: the exported model is measured, compared with the champion, and judged; a report says why.

It may import what components share, and of `preprocess` only the profile of a dataset.
"""

from shardline.components.validate.export.formats import check_formats
from shardline.components.validate.rules import RARE, Gate

__all__ = ["RARE", "Gate", "check_formats"]
