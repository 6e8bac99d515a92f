"""Metrics: what is measured of predictions, with intervals, by name and kind of label.

It may import nothing else of `validate`.
"""
