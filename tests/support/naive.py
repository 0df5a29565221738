"""The plain loop over transformers, which is shipped for the tests of plug-ins."""

from langchain_card.testing.naive import Answer, Forward, generate, load, process, reading

__all__ = ["Answer", "Forward", "generate", "load", "process", "reading"]
