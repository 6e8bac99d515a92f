"""The first task of a run: it checks the parameters, and skips the run where nothing has changed.

It may import the settings of the components that it configures, the sources, and `model_store`.
"""
