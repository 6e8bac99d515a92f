"""Schema of a source: its labels, the types of its columns, and values that do not fit them.

It may import `storage`, and nothing else of `preprocess`.
"""
