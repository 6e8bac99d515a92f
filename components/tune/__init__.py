"""Hyperparameter tuning: the study, the tuning job, and the best of its trials.

It may import `train` and `vertex`, and no other component.
"""
