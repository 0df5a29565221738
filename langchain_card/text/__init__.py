"""Tools in text: how a model is told of them, what its calls look like, and how they are read."""
