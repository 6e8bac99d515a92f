"""The container image of all components and of the trainer: what goes into it, and its build."""
