"""Preprocessing: a source of labelled examples becomes TFRecord shards and their manifest.

It may import `storage`, `runs` and `vertex`, but no other component, and never loads TensorFlow.
"""
