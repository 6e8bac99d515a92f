"""Records of runs, on this machine and on the platform: state, results, logs, and causes of failures.

It may import `text` and `vertex`, and no component.
"""
