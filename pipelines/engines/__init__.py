"""Engines: what starts the replicas of a custom job, and what can be asked about a run.

`custom_job` is what every engine takes: the worker pools of a CustomJob, and a replica's environment.
`engine` answers for run directories, here and of Slurm, and for Vertex AI. Nothing here knows `local` or the
command line.
"""
