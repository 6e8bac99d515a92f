"""Vertex AI Pipelines: submission, uploads, schedules, and the checks of `shardline doctor`.

It may import the specs, settings and rules of `pipelines`.
"""
