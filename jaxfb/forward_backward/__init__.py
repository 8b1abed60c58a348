"""Computes gradients from a planned batch: all microbatches, forward and backward, in one call."""

from jaxfb.forward_backward.engine import ForwardBackward, get_forward_backward_func
from jaxfb.forward_backward.microbatches import Microbatches, specs_of, split
from jaxfb.forward_backward.packed import Packed

__all__ = ["ForwardBackward", "Microbatches", "Packed", "get_forward_backward_func", "specs_of", "split"]
