"""Data adapters: a program's own arrays, datasets and generators as batches of an epoch, for any replica.

It may import `data` and what `data` may import.
"""
