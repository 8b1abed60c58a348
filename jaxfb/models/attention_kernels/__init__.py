"""Runs attention by the kernels that a device has: splash on TPUs, cuDNN on GPUs, plain JAX elsewhere."""
