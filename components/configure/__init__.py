"""The first and the last task of a run: its three objects, what has changed, and what is remembered."""
