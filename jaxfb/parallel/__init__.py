"""The axes of a mesh: how arrays are cut over each, and the collectives that combine them."""

from jaxfb.platforms.compat import mend_cpu_collectives

mend_cpu_collectives()
