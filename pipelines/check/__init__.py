"""Static checks of compiled pipelines and settings, without Google Cloud. No KFP, no TensorFlow."""
