"""A custom job on this machine: its replicas, their environment, restarts, failures and trials.

It may import `process`; it knows no pipeline.
"""
