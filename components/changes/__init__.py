"""The first task of a run: it checks the parameters and detects changes since the last run.

It may import the settings of the components that follow, the sources, and `model_store`.
"""
