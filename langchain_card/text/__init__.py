"""Text and tokens: chat messages to prompts, token ids to text, and calls of tools within text."""
