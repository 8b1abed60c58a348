"""Makes the parts of a run from its config, each by itself; `training/setup.py` joins them."""
