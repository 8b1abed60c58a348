"""Makes one update of a global batch. `train_step.py` is the file to read first, `apply.py` the optax update in it.

train_step -> split_step (an update of several calls), states (where a state lives) -> programs (what is traced) ->
apply
"""
