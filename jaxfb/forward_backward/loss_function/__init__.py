"""Calls the user's loss function, checks what it returns, and finds out what its results read and add up."""
