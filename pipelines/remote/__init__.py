"""Vertex AI Pipelines: submission, uploads and schedules.

It may import the specs, settings and rules of `pipelines`.
"""
