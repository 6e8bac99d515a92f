"""A dataset directory, read: its manifest, the shards of each worker, and the batches that a model takes.

It may import `checkpoint` and what `checkpoint` may import.
"""
