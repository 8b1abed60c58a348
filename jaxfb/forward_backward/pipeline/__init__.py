"""Runs the ticks of a pipeline's schedule on every device."""
