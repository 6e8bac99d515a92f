"""The cluster of a run: its processes, its strategy, and how gradients travel between them."""
