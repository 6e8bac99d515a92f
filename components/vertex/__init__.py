"""Vertex."""
