"""What is wrong with a compiled pipeline, known in a second and without Google Cloud."""
