"""Vertex AI Pipelines: environment, submission, uploads, schedules, and the doctor."""
