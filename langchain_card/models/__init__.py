"""From a model's name to a loaded model."""
