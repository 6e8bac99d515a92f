"""One image: its header, its pixels, and the bytes that are stored for it.

It imports nothing else of `preprocess`.
"""
