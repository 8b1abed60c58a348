"""Holds what a process shows to those around it: its phase, its exit code, the points where a test may kill it."""
