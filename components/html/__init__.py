"""Pages for people: what the report and the dataset card share."""
