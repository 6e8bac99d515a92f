"""Configure."""
