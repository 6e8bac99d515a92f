"""The components ring: Kubeflow Pipelines components, each a thin body over the module beside it."""
