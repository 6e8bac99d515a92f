"""Keras callbacks of every run, and those that a user brings."""
