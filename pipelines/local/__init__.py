"""Local runs: a compiled pipeline on this machine, its custom jobs as real processes.

It may import the specs and settings of `pipelines`; inside, `process` knows no `job`, and `job` no pipeline.
"""
