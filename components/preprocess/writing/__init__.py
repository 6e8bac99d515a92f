"""Writing: one shard and its mark, and the dataset that all of them become."""
