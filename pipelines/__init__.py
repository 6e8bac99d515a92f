"""The two pipelines, their settings and compiled YAML, and runs on this machine and on the platform.

It may import both other rings, click and the KFP compiler; it handles no tensors and no TFRecord files.
"""
