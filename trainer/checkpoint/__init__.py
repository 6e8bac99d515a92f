"""Checkpoints: a run's training state, its files, and its identity when it resumes.

It may import `distribute` and what `distribute` may import.
"""
