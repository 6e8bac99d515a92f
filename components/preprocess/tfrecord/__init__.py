"""TFRecord files and tf.train.Example as bytes, read and written without TensorFlow.

It may import `storage`, but nothing else of `preprocess`.
"""
