"""Vertex AI: its API's forms, worker pools, jobs, the launcher's payload, and one client with retries.

It may import `text`, the trainer and, inside functions, Google's clients; it knows no component.
"""
