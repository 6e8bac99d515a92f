"""Looking at a finished dataset directory: what it says of itself, what is in it, whether it is whole.

Nothing here loads TensorFlow, and nothing writes.
"""
