"""Answers that outlive their engines: the relay holds what was written, and any engine of the same kind goes on."""
