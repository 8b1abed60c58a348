"""The flags of XLA in tests: programs that run once or twice are compiled quickly, and run slowly."""

from jaxfb.platforms import cpu

# with two processes of tests on two cores, several threads that compile one program only cost processor time: 8% more
# (five compilations of a transformer's accumulation and interleaved pipeline)
ONE_THREAD = {"--xla_cpu_parallel_codegen_split_count": 1}


def flags(devices=None):
    """XLA_FLAGS of a process, with so many simulated devices."""
    count = {"--xla_force_host_platform_device_count": devices} if devices else {}
    # a flag that XLA does not know ends the process
    tested = ONE_THREAD if cpu._version() < cpu._TESTED else {}
    asked = count | cpu.quickly_compiled() | tested
    return " ".join(f"{name}={value}" for name, value in asked.items())
