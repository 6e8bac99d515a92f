"""Keras and TensorFlow internals: every use of their undocumented interfaces, each with its reason.

It may import `base` only.
"""
