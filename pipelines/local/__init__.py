"""The local run: a compiled pipeline, with its custom jobs as real processes, on this machine."""
