"""Hyperparameter tuning: what is searched, what a trial runs, and which trial was the best."""
