"""Searches at random for violations of the law: models, meshes, schedules and options next to one device.

    draw a Case from (seed, index) -> its problem -> the engine and one device -> what differs -> a smaller case

`jaxfb check --random N` runs cases in separate processes, so that an abort of XLA or a hang is found like a wrong
number. `check_random` is the same for a model at hand, in this process.
"""
