"""Weights in the blocks of GGUF files: their formats, their layout in memory, and products with them."""
