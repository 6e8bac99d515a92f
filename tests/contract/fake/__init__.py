"""A Vertex AI on this machine, for clients that know nothing of it."""
