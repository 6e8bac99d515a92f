"""Cluster of a run: its processes, its tf.distribute strategy, and the exchange of gradients.

It may import `keras_compat` and `base`.
"""
