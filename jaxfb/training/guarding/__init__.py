"""Notices updates that went wrong, by spikes of the loss or devices that compute wrongly, and computes them again."""
