"""Writing: shards in one or many processes, their marks, and the dataset that they become."""
