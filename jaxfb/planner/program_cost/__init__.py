"""Computes what a compiled program costs on a chip: traffic and products, from its text.

Also what that text lacks: how often branches are taken, and what kernels, libraries and experts compute.
"""
