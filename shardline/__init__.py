"""Shardline: from a dataset and a Keras model to a retraining pipeline for Vertex AI Pipelines."""
