"""The last task of a run, which runs however the run came out: what became of it, and who is told."""
