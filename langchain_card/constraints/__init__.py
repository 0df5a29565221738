"""What an answer may say: grammars, bounded and compiled, and the shortest end from wherever an answer is."""
