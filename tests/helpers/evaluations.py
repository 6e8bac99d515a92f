"""A small evaluation, as evaluation.json holds it."""

#: Ten examples of two classes, one of them wrong.
EVALUATION = {
    "fingerprint": "sha256:abc",
    "split": "test",
    "examples": 10,
    "accuracy": 0.9,
    "log_loss": 0.25,
    "class_names": ["healthy", "sick"],
    "confusion": [[5, 1], [0, 4]],
    "metrics": {"accuracy": 0.9, "log_loss": 0.25},
}
