"""The command `shardline`: one file per verb, or family of verbs."""
