"""Engines in a process that may die: their pool, messages, entry point."""
