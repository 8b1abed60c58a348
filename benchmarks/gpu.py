"""Times a 1B Llama-like model on one GPU: tokens a second, and their share of the rate of large matmuls.

    jaxfb bench gpu                       # all parts, the most informative first; needs an accelerator
    jaxfb bench gpu --part rate,step      # some of them
    jaxfb bench gpu --minutes 9           # starts nothing new after nine minutes; run it again to continue
    jaxfb bench gpu --tiny                # the same code at a size for a CPU; prints and keeps nothing
    jaxfb bench gpu --torch-python PATH   # with the part "accelerate": a python with benchmarks/torch_requirements.txt

bfloat16 compute, float32 master parameters and gradient sums, AdamW, clipping, 65,536 tokens an update accumulated over
microbatches. The model's operations are those of `flops_per_token`, without recomputation; their rate is given as a
share of the rate that large bfloat16 products reach on this device in the same session. A setting that does not fit in
memory is recorded as such.

Every number is written to results/gpu_*.json as soon as it is measured, and is not measured again without --fresh, so a
run that is cut off continues where it was. Compiled programs are kept between runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import loops
import report
from gpu_grouped import grouped
from gpu_profile import profile as profiled
from gpu_step import Setting, matmul_rate, measure
from gpu_trainer import trained

from jaxfb.config.schema import build
from jaxfb.models.config import TransformerConfig, num_params
from jaxfb.training.compile_cache import use_compile_cache

LLAMA_1B = TransformerConfig(
    vocab_size=128256, num_layers=16, hidden_size=2048, num_heads=32, num_kv_heads=8, mlp_size=8192,
    rope_theta=500_000.0, tied_embeddings=True,
)  # fmt: skip
TINY = TransformerConfig(
    vocab_size=256, num_layers=2, hidden_size=128, num_heads=2, mlp_size=256, tied_embeddings=True
)


@dataclass(frozen=True)
class Scale:
    """What `--tiny` makes small. best: the setting that the others are variations of."""

    sizes: TransformerConfig
    best: Setting
    steps: int
    square: int
    microbatches: tuple[int, ...]
    contexts: tuple[int, ...]
    experts: tuple[int, ...]
    flags: dict[str, str]


FLAGS = {
    "as it is, apart": "--xla_gpu_autotune_level=4",  # the default: what a process of its own measures
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "no Triton products": "--xla_gpu_enable_triton_gemm=false",
    "slices fused": "--xla_gpu_enable_dynamic_slice_fusion=true",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
}
FULL = Scale(
    sizes=LLAMA_1B,
    best=Setting(rows=16, size=4, length=4096, remat="selective", loss_chunk=4096),
    steps=5,
    square=8192,
    microbatches=(1, 2, 4, 8),
    contexts=(8192, 32768),
    experts=(4, 8),
    flags=FLAGS,
)
SMALL = Scale(
    sizes=TINY,
    best=Setting(rows=16, size=4, length=32, remat="selective", loss_chunk=64),
    steps=2,
    square=128,
    microbatches=(1, 4),
    contexts=(64,),
    experts=(4,),
    flags={"apart": FLAGS["as it is, apart"]},
)


class Bench:
    """Where numbers go as they come: {part: {name: {column: number}}} in one file, read back at the start."""

    def __init__(
        self,
        scale: Scale,
        path: Path,
        minutes: float = float("inf"),
        fresh: bool = False,
        hold: bool = True,
        torch_python: str | None = None,
    ):
        """hold: measure in this process; False leaves the device's memory to processes of their own."""
        self.scale, self._path, self._hold, self.torch_python = scale, path, hold, torch_python
        self._ends = time.monotonic() + 60 * minutes
        about = {"model": asdict(scale.sizes), "parameters": num_params(scale.sizes), "steps": scale.steps}
        about = json.loads(json.dumps(about))  # as a file has it: tuples are lists there
        self._found = {"benchmark": "gpu", "settings": about, "machine": report.machine()}
        if not fresh and path.exists() and (before := json.loads(path.read_text())).get("settings") == about:
            self._found |= {part: rows for part, rows in before.items() if part not in self._found}

    @property
    def best(self) -> Setting:
        return self.scale.best

    @property
    def found(self) -> dict:
        return self._found

    def once(self, part: str, name: str, make: Callable[[], dict]) -> dict | None:
        """The numbers of one row: those on file, or what `make` gives, written at once; None if time is up."""
        row = self._found.get(part, {}).get(name)
        if row is not None and "failed" not in str(row.get("result")):
            return row
        if time.monotonic() > self._ends:
            print(f"{part} {name}: left for the next run", file=sys.stderr)
            return None
        self._write(part, name, row := make())
        print(f"{part} {name}: {json.dumps(row)}", file=sys.stderr, flush=True)
        return row

    def step(self, part: str, name: str, setting: Setting) -> dict | None:
        """A row of `measure`; what another part measured of the same setting is taken over."""
        if same := self._measured(setting):
            self._write(part, name, same)
            return same
        how = {"steps": self.scale.steps, "rate": self.rate}
        return self.once(part, name, lambda: self.run("measure", setting, **how))

    def run(self, what: str, setting: Setting, **how) -> dict:
        """One of WORK, in this process where nothing speaks against it."""
        if self._hold and not setting.flags:
            return WORK[what](self.scale.sizes, setting, **how)
        return apart(what, self.scale.sizes, setting, **how)

    @property
    def rate(self) -> float:
        """Operations a second of large products."""
        return 1e12 * self.rate_of("square", 3 * (self.scale.square,)).get("tflops", float("nan"))

    def rate_of(self, name: str, shape: tuple[int, int, int]) -> dict:
        return self.once("rate", name, lambda: self.run("rate_of", self.best, shape=shape)) or {}

    def conclude(self, part: str, name: str, verdict: Callable[[dict], dict]) -> None:
        """Writes what follows from the rows of a part so far."""
        rows = {row: numbers for row, numbers in self._found.get(part, {}).items() if row != name}
        self._write(part, name, verdict(rows))

    def fastest(self, part: str) -> dict:
        """The row of a part with the most tokens a second, or {}."""
        rows = [row for row in self._found.get(part, {}).values() if "tokens_per_second" in row]
        return max(rows, key=lambda row: row["tokens_per_second"], default={})

    def _measured(self, setting: Setting) -> dict | None:
        rows = [row for part in PARTS for row in self._found.get(part, {}).values()]
        return next((row for row in rows if asdict(setting).items() <= row.items()), None)

    def _write(self, part: str, name: str, row: dict) -> None:
        self._found.setdefault(part, {})[name] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self._found, indent=2) + "\n")
        unfinished.replace(self._path)


def rate(bench: Bench) -> None:
    """What large products reach, and those of this model's shapes."""
    sizes, tokens = bench.scale.sizes, bench.best.size * bench.best.length
    bench.rate  # noqa: B018  # measured now
    for name, n in {"attention": sizes.hidden_size, "mlp": sizes.mlp_size, "head": sizes.vocab_size}.items():
        bench.rate_of(name, (tokens, sizes.hidden_size, n))


def step(bench: Bench) -> None:
    """The update as it is meant to be run, with and without recomputation."""
    for remat in ("selective", "none"):
        bench.step("step", f"remat {remat}", replace(bench.best, remat=remat))


def changes(bench: Bench) -> None:
    """What each choice bought: the best setting with one thing undone."""
    best = bench.best
    bench.step("changes", "as it is", best)
    bench.step("changes", "attention by XLA, not cuDNN", replace(best, attention="xla"))
    bench.step("changes", "loss in chunks of 1024", replace(best, loss_chunk=1024))
    bench.step("changes", "all logits at once", replace(best, loss_chunk=best.size * best.length))
    bench.step("changes", "state not donated", replace(best, donated=False))
    bench.step("changes", "packed documents", replace(best, segments=8))
    bench.step("changes", "optimizer's state on the host", replace(best, optimizer_memory="host"))


def microbatch(bench: Bench) -> None:
    """Rows of a microbatch: how much work hides what each costs."""
    for size in bench.scale.microbatches:
        bench.step("microbatch", str(size), replace(bench.best, size=size))


def remat(bench: Bench) -> None:
    """Memory for time."""
    for name in ("none", "selective", "full", "offload"):
        bench.step("remat", name, replace(bench.best, remat=name))


def context(bench: Bench) -> None:
    """Longer rows, as many tokens an update."""
    for length in bench.scale.contexts:
        rows = max(1, bench.best.tokens // length)
        bench.step("context", str(length), replace(bench.best, rows=rows, size=1, length=length))


def experts(bench: Bench) -> None:
    """A mixture of experts in place of the MLP, with as many operations for a token; and its products alone."""
    for number in bench.scale.experts:
        bench.step("experts", str(number), replace(bench.best, experts=number))
    most = bench.scale.experts[-1]
    bench.once("experts", f"products of {most}", lambda: bench.run("grouped", bench.best, experts=most))


def flags(bench: Bench) -> None:
    """XLA flags, each in a process of its own."""
    for name, flag in bench.scale.flags.items():
        bench.step("flags", name, replace(bench.best, flags=flag))


def training(bench: Bench) -> None:
    """`jaxfb train`, with its loader, log and checkpoint, beside the bare update."""
    bench.step("training", "bare update", bench.best)
    with tempfile.TemporaryDirectory() as directory:
        how = {"updates": 4 * bench.scale.steps, "rate": bench.rate, "directory": directory}
        bench.once("training", "jaxfb train", lambda: bench.run("trained", bench.best, **how))


def profile(bench: Bench) -> None:
    """Where the time goes; without command buffers, since a graph of kernels has one name. Trace: benchmarks/trace."""
    setting = replace(bench.best, flags=FLAGS["no command buffers"] if jax.default_backend() == "gpu" else "")
    with tempfile.TemporaryDirectory() as nowhere:
        directory = nowhere if bench.scale is SMALL else str(report.RESULTS.parent / "trace")
        how = {"steps": 3, "directory": directory}
        bench.once("profile", "milliseconds", lambda: bench.run("profiled", setting, **how))


def accelerate(bench: Bench) -> None:
    """The same update by the plain Accelerate loop, eager and compiled, and ours, each with the device to itself.

    Theirs keeps all activations; ours too, unless the part "step" measured recomputation to be faster.
    """
    if bench.torch_python is None:
        return print("accelerate: asks for --torch-python", file=sys.stderr)
    best, device = bench.best, "cuda" if jax.default_backend() == "gpu" else "cpu"
    sizes, model = (best.size, 1), replace(bench.scale.sizes, loss_chunk=best.loss_chunk)
    how = {"remat": bench.fastest("step").get("remat", best.remat), "device": device}
    each = loops.on_accelerator(
        bench.torch_python, model, best.length, best.rows, sizes, bench.scale.steps, **how
    )
    for name, make in each.items():
        bench.once("accelerate", name, make)
    bench.conclude("accelerate", "the best of each", loops.verdict)


PARTS: dict[str, Callable[[Bench], None]] = {
    part.__name__: part
    for part in (
        rate,
        step,
        accelerate,
        profile,
        changes,
        training,
        experts,
        microbatch,
        remat,
        context,
        flags,
    )
}  # the most informative first
ALONE = {"accelerate", "profile", "training", "flags"}  # what these measure starts in processes of its own
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def rate_of(sizes: TransformerConfig, setting: Setting, shape: tuple[int, int, int]) -> dict:
    """Teraflops of products of this shape."""
    return {"shape": "x".join(map(str, shape)), "tflops": round(matmul_rate(*shape) / 1e12, 4)}


WORK = {"rate_of": rate_of, "measure": measure, "grouped": grouped, "profiled": profiled, "trained": trained}


def apart(what: str, sizes: TransformerConfig, setting: Setting, **how) -> dict:
    """One of WORK in a process of its own, started with the setting's XLA flags."""
    request = json.dumps({"what": what, "sizes": asdict(sizes), "setting": asdict(setting), "how": how})
    command = [sys.executable, __file__, "--one", request]
    done = subprocess.run(command, env=environment_with(setting.flags), capture_output=True, text=True)
    if done.returncode:
        return {"result": f"failed: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}"}
    return json.loads(done.stdout.splitlines()[-1])


def environment_with(flags: str) -> dict[str, str]:
    """This process's environment with further XLA flags; XLA takes a blank XLA_FLAGS for the name of a file."""
    environment = {
        name: value for name, value in os.environ.items() if name not in (PREALLOCATE, "XLA_FLAGS")
    }
    joined = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    return environment | ({"XLA_FLAGS": joined} if joined else {})


def answer(request: str) -> None:
    """The other end of `apart`."""
    asked = json.loads(request)
    sizes, setting = build(TransformerConfig, asked["sizes"]), Setting(**asked["setting"])
    print(json.dumps(WORK[asked["what"]](sizes, setting, **asked["how"])))


def main() -> None:
    options = arguments()
    if options.tiny:  # compiled quickly, not well
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    if options.one or options.tiny or len(options.part) == 1:
        return run(options)
    ends = time.monotonic() + 60 * options.minutes
    for index, part in enumerate(options.part):  # each in a process of its own, with all the memory
        left = str((ends - time.monotonic()) / 60)
        results = ["--results", str(options.results)] if options.results else []
        fresh = ["--fresh"] if options.fresh and index == 0 else []
        torch = ["--torch-python", options.torch_python] if options.torch_python else []
        command = [sys.executable, __file__, "--part", part, "--minutes", left, *results, *fresh, *torch]
        if code := subprocess.run(command).returncode:
            sys.exit(code)


def run(options) -> None:
    """The parts that are asked for, in this process; or the one thing that `apart` asks for."""
    hold = options.tiny or bool(options.one) or not set(options.part) & ALONE
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if not hold:
        os.environ[PREALLOCATE] = "false"
    use_compile_cache()
    if options.one:
        return answer(options.one)
    if jax.default_backend() == "cpu" and not options.tiny:
        sys.exit(
            "gpu.py: jax finds no accelerator here; to try the same code on a CPU use: jaxfb bench gpu --tiny"
        )
    name = f"gpu_{jax.default_backend()}_jax{jax.__version__}.json"
    with tempfile.TemporaryDirectory() as nowhere:
        directory = options.results or (Path(nowhere) if options.tiny else report.RESULTS)
        scale = SMALL if options.tiny else FULL
        bench = Bench(scale, directory / name, options.minutes, options.fresh, hold, options.torch_python)
        for part in options.part:
            PARTS[part](bench)
        print(json.dumps(bench.found, indent=1))


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ",".join(PARTS)
    parser.add_argument("--part", type=parts, default=list(PARTS), help=f"some of {names} (default: all)")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start nothing new after so many minutes"
    )
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--results", type=Path, help="directory of the file (default: benchmarks/results)")
    parser.add_argument("--tiny", action="store_true", help="use a size for a CPU, and keep nothing")
    parser.add_argument("--torch-python", help="a python with torch_requirements.txt installed")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def parts(names: str) -> list[str]:
    asked = names.split(",")
    if unknown := [name for name in asked if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; use some of {', '.join(PARTS)}")
    return asked


if __name__ == "__main__":
    main()
