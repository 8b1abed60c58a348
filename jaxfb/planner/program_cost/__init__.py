"""Computes what a compiled program costs on a chip: traffic and products from its text, and what no text contains."""
