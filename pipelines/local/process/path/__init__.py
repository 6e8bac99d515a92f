"""First directory on the path of a local run's processes: Python imports its sitecustomize at start.

It may import the standard library only.
"""
