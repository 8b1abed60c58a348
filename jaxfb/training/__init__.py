"""Runs training: everything that `jaxfb.trainer` and `jaxfb.rl` need around the train step.

In the order of a run: `from_config` and `setup` make what it consists of from its config, `job` joins its processes,
`rows` feeds it, `persistence` and `session` know what is saved and done, `guarding` notices updates that went wrong,
`reporting` prints what was done, and `loop` runs all of it for each `work` (pretraining, your own model,
post-training).
"""
