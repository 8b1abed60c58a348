"""Makes one update of a global batch: `train_step.py` is the file to read first, `apply.py` the optax update in it."""
