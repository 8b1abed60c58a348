"""How XLA compiles the programs of tests: each runs once or twice, so in a third of the time, and not well."""

from jaxfb.cpu import quickly_compiled


def flags(devices=None):
    """XLA_FLAGS of a process, with so many simulated devices."""
    count = {"--xla_force_host_platform_device_count": devices} if devices else {}
    asked = count | quickly_compiled()
    return " ".join(f"{name}={value}" for name, value in asked.items())
