"""The training ring: paths, tensors, TF_CONFIG and AIP_*; nothing of Kubeflow or Google Cloud."""
