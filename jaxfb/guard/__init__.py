"""What watches over a run's numbers: spikes, repeated updates, replicas that differ, and faults to try it with."""
