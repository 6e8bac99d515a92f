"""Checkpoints: what is saved, when, and by which run training may be continued.

It may import `cluster` and what `cluster` may import.
"""
