"""Preprocessing: a source of labelled examples becomes TFRecord shards and their manifest.

It may import `storage`, `runs` and `vertex`; it loads no TensorFlow and knows no other component.
"""
