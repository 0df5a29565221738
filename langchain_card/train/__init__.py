"""Training of heads: answers of the target with their states, and the loop."""
