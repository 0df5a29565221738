"""Run one forward pass over rows of any sequences: runner, KV, attention, sampling."""
