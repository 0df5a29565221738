"""Measurements of `langchain-card bench`, `trace`, `doctor` and `plan`."""
