"""`shardline check`: static checks of a compiled pipeline and of a run of it, without Google Cloud.

It may import the specs and settings of `pipelines`, and `image`; it loads neither KFP nor TensorFlow.
"""
