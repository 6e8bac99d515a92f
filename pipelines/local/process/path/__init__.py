"""First on the path of the processes of a local run: what Python imports before all else."""
