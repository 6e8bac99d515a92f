"""Slurm: jobs that run a program N times on its nodes, as scripts of sbatch or requests of its REST API."""
