"""Runs the layers of a stage forward and backward: what is kept, gathered, recomputed and scattered."""
