"""Asks the compiler itself: memory, work and traffic of the step, compiled ahead of time in a separate process.

This takes a separate process, since the environment that starts libtpu or simulates devices is read once, when JAX
starts, and a compiler does not free what it allocates.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxfb.config import Config, config_from_dict, config_to_dict
from jaxfb.planner import gpu, tpu
from jaxfb.planner.topology import Topology
from jaxfb.platforms.compiler import Options, names_taking_memory
from jaxfb.platforms.programs import size_of_refusal
from jaxfb.refusal import Refused


@dataclass(frozen=True)
class Compiled:
    """Holds what the compiler reports. Bytes, on one device.

    arguments: the train state and the batch. temporaries: everything else, gradients included.
    outputs: results that are not written in the place of an argument. code: of the program.
    flops, hbm_bytes, work_seconds, product_seconds, traffic: as `hlo_cost.Cost`; traffic rows as dicts.
    computed_twice: whether the program fits only in a form in which XLA computes products twice to save memory.
    """

    arguments: int
    temporaries: int
    outputs: int
    code: int
    lower_seconds: float
    compile_seconds: float
    flops: float
    hbm_bytes: float
    work_seconds: float
    product_seconds: float
    traffic: list[dict[str, Any]] = field(default_factory=list)
    computed_twice: bool = False

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.outputs + self.code


@dataclass(frozen=True)
class TooLarge:
    """The compiler refused: so many bytes needed where so many are available."""

    needed: float
    available: float
    message: str


def compile_for(
    config: Config, topology: Topology, say: Callable[[str], None] = lambda text: None
) -> Compiled | TooLarge:
    """Compiles the step of `config` for `topology`; minutes for a large model. `say` gets the time so far.

    Raises:
      ValueError: the compiler is missing, or will not make that topology, or the mesh does not fit on it.
    """
    if (missing := missing_compiler(topology)) is not None:
        raise _not_installed(missing)
    request = {"config": config_to_dict(config), "topology": topology.text}
    with tempfile.TemporaryDirectory() as directory:
        result = _run_child(request, topology, Path(directory), say)
    if "refused" in result:
        raise Refused(result["refused"])
    if "too_large" in result:
        return TooLarge(**result["too_large"])
    return Compiled(**result["compiled"])


def compiles_here(config: Config, topology: Topology, say: Callable[[str], None]) -> bool:
    """Returns whether to ask the compiler; a plan for GPUs reports why it is not asked."""
    if topology.platform != "gpu":
        return True
    missing = missing_compiler(topology)
    if missing:
        say(f"{missing}; without it a formula's estimate")
    elif config.optimizer.memory == "host":
        say(f"{gpu.NO_STATE_ON_HOST}; a formula's estimate")
        return False
    return not missing


def check_compiler(topology: Topology) -> None:
    """Refuses a plan by the TPU compiler where it is not installed; a plan for GPUs falls back to the formula.

    Raises:
      ValueError: what to install.
    """
    if topology.platform == "tpu" and (missing := missing_compiler(topology)) is not None:
        raise _not_installed(missing)


def _not_installed(missing: str) -> Refused:
    return Refused(f"[plan] {missing}, or add --no-compile for a formula's estimate")


def missing_compiler(topology: Topology) -> str | None:
    """Returns what to install for this topology; None where its compiler is there."""
    if topology.platform == "tpu" and not tpu.is_installed():
        return f"the TPU compiler is not installed; {tpu.INSTALL}"
    if topology.platform == "gpu" and not gpu.is_installed():
        return f"XLA's compiler for GPUs is not installed; {gpu.INSTALL}"
    return None


def _run_child(request: dict, topology: Topology, directory: Path, say: Callable[[str], None]) -> dict:
    request_file, result_file, log = directory / "request.json", directory / "result.json", directory / "log"
    request_file.write_text(json.dumps(request))
    command = [sys.executable, "-m", "jaxfb.planner.compiled", str(request_file), str(result_file)]
    began, reported = time.monotonic(), 0.0
    every = seconds_between_reports()
    with log.open("w") as output:
        child = subprocess.Popen(
            command, env=_environment(topology), stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        try:
            while child.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - began - reported > every:
                    reported = time.monotonic() - began
                    say(f"compiling for {topology.text}: {reported:.0f} s")
        finally:
            child.kill()  # nothing, where it has ended
            child.wait()
    if result_file.exists():
        return json.loads(result_file.read_text())
    if child.returncode == -signal.SIGKILL:
        raise Refused(
            "[plan] the process that compiles was killed (SIGKILL), as where memory runs out; free some, or add "
            "--no-compile for a formula's estimate"
        )
    last = "\n".join(log.read_text().splitlines()[-15:])
    raise RuntimeError(f"the compiler ended with code {child.returncode}:\n{last}")


def seconds_between_reports() -> int:
    """Returns how often progress is reported: rarely where it goes to a file."""
    return 10 if sys.stderr.isatty() else 60


def _environment(topology: Topology) -> dict[str, str]:
    """Returns the environment of the child process: one platform, the TPU's switches or so many simulated devices."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    environment.pop("JAX_ENABLE_X64", None)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if topology.platform == "cpu":
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={topology.num_devices}"
        return environment
    if topology.platform == "gpu":
        return environment  # XLA_FLAGS are the user's, and what is planned
    environment.pop("XLA_FLAGS", None)  # a TPU's flags are not known to the CPU client, and the reverse
    return environment | tpu.ENVIRONMENT


def main(arguments: list[str]) -> None:
    """Runs in the child process: reads a request, writes the result."""
    from jaxfb.planner.topology import parse_topology

    request = json.loads(Path(arguments[0]).read_text())
    try:
        config, topology = config_from_dict(request["config"]), parse_topology(request["topology"])
        result = _result(config, topology, Path(arguments[1]).parent)
    except ValueError as error:
        result = {"refused": str(error)}
    Path(arguments[1]).write_text(json.dumps(result))


def _result(config: Config, topology: Topology, directory: Path) -> dict:
    import jax

    from jaxfb.planner.job import make_job
    from jaxfb.planner.program_cost.routing import routed
    from jaxfb.training.from_config.dtypes import enable_float64

    enable_float64(config)
    jax.config.update(
        "jax_compilation_cache_include_metadata_in_key", True
    )  # scopes are read (`program_cost/branches.py`)
    if topology.platform == "gpu":
        config = gpu.with_attention(config, "cudnn" if gpu.takes_flash(config, topology) else "xla")
    job = make_job(config, _mesh(config, topology))
    began = time.monotonic()
    traced = job.step.trace(job.state, job.batch)
    lowered = traced.lower()
    lowered_at = time.monotonic()
    try:
        program = lowered.compile(tpu.report_into(directory) if topology.platform == "tpu" else None)
    except jax.errors.JaxRuntimeError as error:
        if (refusal := too_large(str(error))) is None:
            raise
        if (fewer := _without_memory(config, job.step.compiler_options)) is None:
            return {"too_large": asdict(refusal)}
        result = _result(fewer, topology, directory)
        if "compiled" in result:
            result["compiled"]["computed_twice"] = True
        return result
    seconds = (lowered_at - began, time.monotonic() - lowered_at)
    work = routed(job, traced.jaxpr)
    compiled = _read(program, job, topology, work, *seconds)
    if topology.platform == "tpu":
        in_hbm = tpu.reported_bytes(directory) or _peak(program)
        compiled = replace(compiled, temporaries=in_hbm - compiled.arguments - compiled.outputs)
    return {"compiled": asdict(compiled)}


def _peak(program: Any) -> int:
    return program.memory_analysis().peak_memory_in_bytes


def _without_memory(config: Config, options: Options) -> Config | None:
    """Returns the config without the table's options that take memory, as the step is compiled by itself where it does
    not fit; None where there are none.
    """
    dropped = dict.fromkeys(names_taking_memory(options))
    if not dropped:
        return None
    asked = {**(config.parallel.compiler_options or {}), **dropped}
    return replace(config, parallel=replace(config.parallel, compiler_options=asked))


def _mesh(config: Config, topology: Topology):
    from jaxfb.mesh import make_mesh, mesh_sizes

    devices = _devices(topology)
    mesh_sizes(vars(config.mesh), len(devices), topology.platform)
    try:
        return make_mesh(**vars(config.mesh), devices=devices)
    except NotImplementedError:
        sizes = " x ".join(f"{axis} {size}" for axis, size in vars(config.mesh).items() if size != 1)
        raise Refused(
            f"[plan] the axes {sizes} cannot be laid over the torus of {topology.text}; "
            "use sizes that are products of its dimensions"
        ) from None


def _devices(topology: Topology) -> list:
    import jax

    if topology.chip is None:
        return jax.devices()
    if topology.platform == "gpu":
        return gpu.devices(topology.chip, topology.num_devices)
    return tpu.devices(topology)


def _read(program, job, topology: Topology, work, lower_seconds: float, compile_seconds: float) -> Compiled:
    from jaxfb.planner.program_cost.branches import TakenBranches
    from jaxfb.planner.program_cost.hlo_cost import cost_of

    memory = program.memory_analysis()
    taken = TakenBranches(job.schedule.program) if job.schedule else None
    cost = cost_of(program.as_text(), job.mesh, topology.chip, work, taken)
    traffic = [
        {"axes": axes, "kind": kind, **vars(row), "count": round(row.count)}
        for (axes, kind), row in sorted(cost.traffic.items())
    ]
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        lower_seconds=lower_seconds,
        compile_seconds=compile_seconds,
        flops=cost.flops,
        hbm_bytes=cost.bytes,
        work_seconds=cost.work_seconds,
        product_seconds=cost.product_seconds,
        traffic=traffic,
    )


def too_large(message: str) -> TooLarge | None:
    """Reads an out-of-memory message of the TPU compiler; None for any other message."""
    size = size_of_refusal(message)
    return size and TooLarge(*size, message.splitlines()[0])


def _end_with_parent() -> None:
    """Ends this process when its standard input does: a parent that was killed cannot stop its child."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(sys.argv[1:])
