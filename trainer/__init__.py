"""The trainer: the programs that every replica runs, from a dataset directory to a saved model.

It may import numpy, TensorFlow and Keras, but neither Kubeflow Pipelines nor Google Cloud.
"""
