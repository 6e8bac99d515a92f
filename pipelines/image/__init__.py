"""The container image of all components and of the trainer: its content and its build.

It may import no other room of `pipelines`.
"""
