"""Export a trained model, measure the export, and decide whether it may be published."""
