"""The workers, the loop that drives the core, and the engine around them."""
