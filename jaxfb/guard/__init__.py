"""Watches over a run's numbers: spikes, devices that compute or keep something wrong, the layer of the first nan."""
