"""The cluster a process belongs to, its strategy, and what the replicas exchange."""
