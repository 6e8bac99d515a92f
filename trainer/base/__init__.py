"""Base of everything: errors, files, progress, settings, and values read from JSON into dataclasses.

It may import the standard library only, and no other room of the trainer.
"""
