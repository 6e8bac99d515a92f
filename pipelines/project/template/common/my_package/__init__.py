"""A model and the data that it is trained on."""
