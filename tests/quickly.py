"""The flags of XLA in tests: programs that run once or twice are compiled quickly, and run slowly."""

from jaxfb.cpu import quickly_compiled


def flags(devices=None):
    """XLA_FLAGS of a process, with so many simulated devices."""
    count = {"--xla_force_host_platform_device_count": devices} if devices else {}
    asked = count | quickly_compiled()
    return " ".join(f"{name}={value}" for name, value in asked.items())
