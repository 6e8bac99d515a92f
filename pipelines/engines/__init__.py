"""Engines: what places and restarts the replicas of a custom job, beside the processes of this machine.

`custom_job` is what every engine takes: the worker pools of a CustomJob, and a replica's environment.
"""
