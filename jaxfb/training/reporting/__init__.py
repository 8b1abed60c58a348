"""Prints a run's decisions, results and samples, and how to continue it."""
