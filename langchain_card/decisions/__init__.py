"""Decisions: questions of LangChain's decision models as prompts with labels, and answers from their probabilities."""
