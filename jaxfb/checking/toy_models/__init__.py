"""Builds what a case runs: a model, its parameters and rows, and the arguments of the public functions."""
