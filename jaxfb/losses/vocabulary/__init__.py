"""Scores tokens over a large vocabulary, a chunk of tokens, a part or a share of the vocabulary at a time."""
