"""An engine in a process of its own, and what outlives it."""
