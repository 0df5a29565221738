"""The plain loop over transformers, which is shipped for the tests of plug-ins."""

from langchain_card.testing.naive import Forward, PlainAnswer, generate, load, process, reading

__all__ = ["Forward", "PlainAnswer", "generate", "load", "process", "reading"]
