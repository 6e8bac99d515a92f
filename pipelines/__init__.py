"""The pipelines ring: the retraining pipeline, its compiled YAML, and where that YAML runs."""
