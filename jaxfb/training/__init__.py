"""Contains the parts of the trainer, in the order in which a run uses them; `jaxfb.trainer` runs them.

from_config and setup (config to everything a run is made of), run_dir and compile_cache (where it lives), batches
(rows to devices), evaluate, log, guard and interrupt (what may end it early), report and sample (what it shows).
"""
