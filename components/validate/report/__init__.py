"""The report and the model card of a validation, as HTML pages with plots.

It may import `gate` and `metrics`.
"""
