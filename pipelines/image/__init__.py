"""The container image of all components and of the trainer: what goes into it, its build, its rehearsal."""
