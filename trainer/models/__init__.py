"""Models: built-in model functions, heads and label forms of a compiled model, saving and loading.

It may import `data` and what `data` may import.
"""
