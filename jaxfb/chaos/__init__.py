"""Tries a run against faults, one after another: processes that die, bits that flip, devices that compute wrongly.

Every trial compares its end with that of one run that nothing happened to. The work of `jaxfb chaos`.
"""
