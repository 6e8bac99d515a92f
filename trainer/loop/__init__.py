"""Training loop: model building, steps on all replicas, evaluation, and Keras' callbacks.

It may import every package of the trainer, but not the programs at the top that start it.
"""
