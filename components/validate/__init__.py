"""Validation: a trained model becomes an export, which is evaluated, judged and reported.

It may import `model_store`, `runs`, and the profile of a dataset that `preprocess` makes.
"""
