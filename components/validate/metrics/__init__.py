"""Metrics of predictions by name and kind of label, with confidence intervals, and drift.

It may import nothing else of `validate`.
"""
