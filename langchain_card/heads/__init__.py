"""Heads: small trained models over the states of a target, which draft for it. A file each, and what they share."""
