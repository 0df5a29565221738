"""OpenAI's interface: the routes under `/v1`."""
