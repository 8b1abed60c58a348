"""Moves stacked layers between the order of the model and that of the devices, whole or in slices."""
