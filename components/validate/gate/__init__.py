"""The gate: its rules, the evaluation of the champion, and the verdict on a model.

It may import `evaluate`, `export` and `metrics`.
"""
