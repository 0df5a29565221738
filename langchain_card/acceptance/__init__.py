"""Lossy acceptance rules, one file each; the exact rule is in core/walk.py."""
