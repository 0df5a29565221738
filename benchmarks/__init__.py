"""Scripts that measure. Each one's docstring has its command line."""
