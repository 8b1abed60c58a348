"""Estimates memory and time of a step by formula, with no trace and no compiler."""
