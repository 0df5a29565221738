"""Find, download, check, convert and load models and their tokenizers."""
