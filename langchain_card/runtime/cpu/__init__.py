"""Integer kernels and compiled layers for CPUs."""
