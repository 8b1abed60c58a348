"""Draws cases at random, legal by construction, and makes a failing one smaller. No JAX in here."""
