"""The bytes of examples: tf.train.Example and TFRecord, written and read without TensorFlow."""
