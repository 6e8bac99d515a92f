"""Models: built-in model functions, the heads and labels of a compiled model, and saved models.

It may import `adapters` and what `adapters` may import.
"""
