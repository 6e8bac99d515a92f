"""Reading a dataset directory: its manifest, its images, its input pipeline."""
