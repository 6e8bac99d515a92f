"""The training task: a component that expands into a CustomJob with its worker pools.

It may import `vertex`, and no other component.
"""
