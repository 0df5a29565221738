"""Routes as OpenAI's clients know them, under `/v1`."""
