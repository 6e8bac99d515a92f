"""The export: a SavedModel with its signatures, other formats of it, and its predictions.

It may import `metrics`.
"""
