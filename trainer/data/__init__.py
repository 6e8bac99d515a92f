"""Data: batches that a model takes, of a dataset directory or of the data that a program passes.

It may import `checkpoint` and what `checkpoint` may import.
"""
