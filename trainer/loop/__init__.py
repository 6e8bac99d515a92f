"""The training loop: it builds the model, runs its steps on all replicas, and calls Keras' callbacks.

It may import every room of the trainer, but not the programs at the top that start it.
"""
