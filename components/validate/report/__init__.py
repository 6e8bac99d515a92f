"""The report and the model card of a validation: HTML pages with plots.

It may import `gate` and `metrics`.
"""
