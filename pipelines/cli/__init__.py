"""The command `shardline`: one file per verb, or family of verbs.

It may import all of Shardline, inside of the commands where it is slow to load; nothing imports it.
"""
