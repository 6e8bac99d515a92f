"""TFRecord files and tf.train.Example as bytes, read and written without TensorFlow.

It may import `storage`, and nothing else of `preprocess`.
"""
