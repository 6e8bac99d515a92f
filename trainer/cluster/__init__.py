"""The cluster of a run: its processes, its strategy, and how gradients travel between the processes.

It may import `keras_compat` and `base`.
"""
