"""Schedules of pipelines: declared in a file, compared with what exists, and made so."""
