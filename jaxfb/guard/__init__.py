"""Guards a run's numbers: spikes, repeated updates, replicas that differ, and faults to try the guards with."""
