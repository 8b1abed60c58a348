"""The axes of a mesh: how arrays are cut over each, and the collectives that bring them together."""

from jaxfb.compat import give_channels

give_channels()
