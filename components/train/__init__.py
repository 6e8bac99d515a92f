"""Multi-worker training as a Vertex AI CustomJob."""
