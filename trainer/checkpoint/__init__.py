"""Checkpoints: a run's training state, its files, its identity when it resumes, and SIGTERM.

It may import `cluster` and what `cluster` may import.
"""
