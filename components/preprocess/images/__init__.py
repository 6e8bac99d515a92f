"""One image: its header, its pixels, and the bytes that are stored for it.

It may import nothing else of `preprocess`.
"""
