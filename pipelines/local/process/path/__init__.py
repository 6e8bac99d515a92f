"""First directory on the path of a local run's processes: Python imports its sitecustomize at start."""
