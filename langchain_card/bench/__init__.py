"""Measuring, on real machines and on a virtual clock."""
