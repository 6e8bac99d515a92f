"""Distribution: the tf.distribute strategy, the peers, and the exchange of gradients between them.

It may import `keras_compat`, `cluster` and `base`.
"""
