"""Rehearsal of a run: what a training job and all after it need, tried within a minute on a few examples."""
