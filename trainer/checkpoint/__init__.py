"""Checkpoints: what is saved, where, when, and by which run it may be continued."""
