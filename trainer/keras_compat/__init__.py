"""Inside Keras and TensorFlow: every use of what they do not document, each with the upstream reason.

It may import `base` only.
"""
