"""Builds the schedules, one file for each kind; `lockstep`, `steps` and `v_blocks` are what several share."""
