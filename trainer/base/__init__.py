"""Base of all packages: errors, files, progress, settings, plug-ins, and JSON read into dataclasses.

It may import the standard library only, and no other package of the trainer.
"""
