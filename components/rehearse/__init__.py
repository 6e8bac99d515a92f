"""The rehearsal: a training step, an export and a judgement on a few examples, within a minute.

It may import `configure`, `validate` and the tf.train.Example codec of `preprocess`.
"""
