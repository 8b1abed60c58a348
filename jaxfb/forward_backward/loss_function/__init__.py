"""Calls the user's loss function, and finds out what its results read and add up, for rows, tokens and devices."""
