"""Rules other than the exact one (core/walk.py), one file each. All of them are lossy."""
