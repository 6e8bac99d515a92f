"""The pipelines ring: the two pipelines, their settings, their compiled YAML, and where it runs.

It may import both other rings, click and the KFP compiler; it knows no tensors and no TFRecord bytes.
"""
