"""Engines in a process that may die: supervisor, messages, entry point."""
