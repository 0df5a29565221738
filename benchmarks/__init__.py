"""Scripts that measure; each says in its docstring how it is called."""
