"""The gate: its rules, the evaluation of the champion on the same examples, and the verdict on a model.

It may import `evaluate`, `export` and `metrics`.
"""
