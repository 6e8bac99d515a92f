"""Vertex AI Pipelines: submission, uploads, schedules, and the doctor of the platform.

It may import the specs, settings and rules of `pipelines`.
"""
