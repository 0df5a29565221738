"""Grammars that answers obey: JSON schemas, compilation within bounds, and short ways to end an answer."""
