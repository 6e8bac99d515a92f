"""The rehearsal: one training step, export and verdict on a few examples, within a minute.

It may import `changes`, `validate` and the tf.train.Example codec of `preprocess`.
"""
