"""Notices updates that went wrong: spikes of the loss, devices that compute wrongly; dumps to compute them again."""
