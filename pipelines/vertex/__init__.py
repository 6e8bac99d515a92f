"""Everything that speaks to the platform; google.* is imported where it is called."""
