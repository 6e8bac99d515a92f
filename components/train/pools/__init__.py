"""The machines of a training job, and the Vertex AI CustomJob that runs a component on them."""
