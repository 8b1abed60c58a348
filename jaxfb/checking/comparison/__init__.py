"""Runs a case by the engine and by one device in float64, and measures how far the results are apart."""
