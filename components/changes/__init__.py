"""Whether a run has anything to do: what has changed since the last one, and the record of results."""
