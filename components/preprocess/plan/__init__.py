"""The plan: one pass over the source, and the split, shard and image location of every example.

It may import `sources`, `schema`, `images` and `tfrecord`.
"""
