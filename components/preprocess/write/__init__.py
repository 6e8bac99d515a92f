"""Writing: the shards of a plan, a completion marker for each, and the manifest at the end.

It may import `plan` and what `plan` may import.
"""
