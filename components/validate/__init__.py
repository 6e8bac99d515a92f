"""Validation: a model becomes an export, which is measured, judged and reported."""
