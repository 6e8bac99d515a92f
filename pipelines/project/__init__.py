"""Projects that `shardline new` writes, from templates: a folder for each kind of data.

It may import no other folder of `pipelines`.
"""
