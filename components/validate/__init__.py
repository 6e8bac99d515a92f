"""Validation: exports a trained model, evaluates the export, judges it by the gate, and writes the report.

It may import `model_store`, `runs`, and the profile of a dataset that `preprocess` makes.
"""
