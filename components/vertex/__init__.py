"""Vertex AI: its API's forms, worker pools, jobs, the launcher's payload, and one client with retries.

It may import `text` and the trainer; it knows no component.
"""
