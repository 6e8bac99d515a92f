"""The export: a SavedModel with its signatures, converted formats, and its golden predictions.

It may import `metrics`.
"""
