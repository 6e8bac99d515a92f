"""Projects of one's own: what `shardline new` writes, and its templates, a folder for each kind of data."""
