"""Holds what differs between releases of jax and kinds of device: private names, options of XLA, simulated
devices; and how much memory the machine has.
"""
