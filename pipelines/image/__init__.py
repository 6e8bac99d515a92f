"""The container image of all components and of the trainer: its contents and its build.

It may import no other folder of `pipelines`.
"""
