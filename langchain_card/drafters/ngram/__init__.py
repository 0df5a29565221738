"""Drafts from text that was read and written."""
