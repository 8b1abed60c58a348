"""A verdict as a page of text: the headline first, then the numbers it rests on, then what was assumed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from jaxfb.display import number_of
from jaxfb.mesh import SHARD_AXES
from jaxfb.planner.compiled import Compiled, TooLarge
from jaxfb.planner.verdict import MARGIN, Verdict

PHASES = {
    "sampling": "sampling, with its weights, keys and values",
    "logprob_old": "log-probs of the policy",
    "logprob_ref": "log-probs of the reference",
    "value": "values of the critic",
    "eval": "evaluation",
}
"""The phases of post-training beside its updates."""
UNCUT = 0.1
"""Share of the parameters that may be whole on every device without a line about it: scales and other small ones."""


def page(name: str, verdict: Verdict) -> str:
    """Returns lines for a terminal; GB are 10^9 bytes."""
    sections = [
        _head(name, verdict),
        memory_table(verdict),
        _work(verdict),
        _traffic(verdict),
        _speed(verdict),
    ]
    texts = ("\n".join(section) for section in sections)
    return "\n\n".join(text for text in texts if text)


def headline(verdict: Verdict) -> str:
    """Returns one sentence: does it fit, by how much, and according to whom."""
    who = {Compiled: "the compiler", TooLarge: "the compiler"}.get(type(verdict.compiled), "estimated")
    device = _device(verdict)
    if verdict.available is None:
        return f"needs {_gb(verdict.needed)} a device ({who})"
    between = f"{_gb(verdict.needed)} of {_gb(verdict.available)} a {device} ({who})"
    if verdict.fits:
        left = verdict.available - verdict.needed
        close = verdict.compiled is None and left < MARGIN * verdict.available
        warning = ", closer than the formula can tell" if close else ""
        return f"FITS: {between}, {_gb(left)} to spare{warning}"
    over = verdict.needed - verdict.available
    if isinstance(verdict.compiled, TooLarge) and over <= 0:
        return f"DOES NOT FIT in {_gb(verdict.available)} a {device} ({who}): {verdict.compiled.message}"
    return f"DOES NOT FIT: {between}, {_gb(over)} too much"


def _head(name: str, verdict: Verdict) -> Iterator[str]:
    axes = " x ".join(f"{axis} {size}" for axis, size in verdict.mesh.items() if size > 1) or "one device"
    yield f"{name} on {verdict.topology}"
    params = verdict.num_params
    shown = f"{params / 1e9:.2f}B" if params >= 1e9 else f"{params / 1e6:.{0 if params >= 1e8 else 2}f}M"
    yield f"  {shown} parameters, {axes}"
    yield (
        f"  {number_of(verdict.rows, 'row')} = {number_of(verdict.num_microbatches, 'microbatch', 'microbatches')} "
        f"of {number_of(verdict.rows_per_microbatch, 'row')} on each replica, {verdict.tokens:,} tokens"
    )
    if verdict.schedule:
        yield f"  schedule {verdict.schedule}, bubble {verdict.bubble:.1%}"
    yield ""
    yield headline(verdict)
    if verdict.uncut > UNCUT:
        axes = " x ".join(
            f"{axis} {size}" for axis, size in verdict.mesh.items() if axis in SHARD_AXES and size > 1
        )
        yield (
            f"  {axes} leaves {verdict.uncut:.0%} of the parameters whole on every {_device(verdict)}; "
            "choose sizes that divide the model's"
        )


def memory_table(verdict: Verdict) -> Iterator[str]:
    """Yields the lines of the memory that a device needs."""
    counted, compiled = verdict.estimate, verdict.compiled
    answered = isinstance(compiled, Compiled)
    columns = f"{'compiler':>12}" if compiled is not None else ""
    yield f"{f'memory a {_device(verdict)}':<26}{'formula':>12}{columns}"
    rows = [
        ("parameters", counted.parameters, None),
        ("optimizer state", counted.optimizer, None),
        ("batch and the like", counted.batch, None),
        ("  arguments", counted.arguments, answered and compiled.arguments + compiled.outputs),
        ("gradients", counted.gradients, None),
        ("activations", counted.activations, None),
        ("working space", counted.working, None),
        ("  temporaries", counted.temporaries, answered and compiled.temporaries),
        ("program", 0, answered and compiled.code),
        *((f"{name}, beside it", size, answered and size) for name, size in verdict.kept.items()),
    ]
    kept, phases = sum(verdict.kept.values()), max(verdict.phases.values(), default=0.0)
    rows += [
        (
            "total",
            max(counted.total, counted.arguments + phases) + kept,
            max(compiled.total, compiled.arguments + phases) + kept
            if isinstance(compiled, Compiled)
            else compiled and verdict.needed,
        )
    ]
    for name, ours, theirs in rows:
        if ours or theirs:
            yield f"  {name:<24}{_gb(ours):>12}" + (f"{_gb(theirs):>12}" if theirs else "")
    if counted.host:
        yield f"  {'in the memory of the host':<24}{_gb(counted.host):>11} of optimizer state{_price(verdict)}"
    if verdict.phases:
        yield "  at other times, instead of the temporaries:"
    for name, size in verdict.phases.items():
        yield f"    {PHASES.get(name, name)}: {_gb(size)}"


def _work(verdict: Verdict) -> Iterator[str]:
    counted, compiled = verdict.estimate, verdict.compiled
    yield f"work a step, a {_device(verdict)}"
    yield f"  {'the model itself':<34}{_flops(verdict.model_flops)} (no recomputation, no bubble)"
    yield f"  {'with recomputation and bubble':<34}{_flops(counted.flops)}"
    if isinstance(compiled, Compiled):
        yield f"  {'compiled step, loops counted':<34}{_flops(compiled.flops)}"
        yield f"  {'HBM read and written':<34}{compiled.hbm_bytes / 1e9:>12,.1f} GB"
        if compiled.computed_twice:
            yield "  XLA computes products twice to save memory: the program is too large without"


def _traffic(verdict: Verdict) -> Iterator[str]:
    if not verdict.traffic:
        return
    yield f"{'between devices a step':<42}{'count':>8}{'GB':>10}{'ms':>10}{'overlapped':>12}"
    for (axes, kind), row in sorted(verdict.traffic.items(), key=lambda item: -item[1].bytes):
        hidden = f"{max(0.0, 1 - row.exposed_seconds / row.seconds):.0%}" if row.seconds else ""
        milliseconds = f"{row.seconds * 1e3:,.1f}" if verdict.chip else ""
        yield f"  {axes:<20}{kind:<20}{row.count:>8}{row.bytes / 1e9:>10,.3f}{milliseconds:>10}{hidden:>12}"


def _speed(verdict: Verdict) -> Iterator[str]:
    if verdict.chip is None:
        yield "no speed: a simulated CPU has no peak to be measured against"
        return
    chip = verdict.chip
    compiled = verdict.compiled
    shown = partial(duration_of, of=verdict.step_seconds)
    products = f" ({shown(compiled.product_seconds)} of products)" if isinstance(compiled, Compiled) else ""
    host = f", {shown(verdict.host_seconds)} to and from the host" if verdict.host_seconds else ""
    yield (
        f"at best {shown(verdict.step_seconds)} a step: {shown(verdict.work_seconds)} work{products}, "
        f"{shown(verdict.exposed_seconds)} exposed communication{host}"
    )
    device = _device(verdict)
    yield f"  {verdict.tokens_per_second:,.0f} tokens/s a {device}, MFU {verdict.mfu:.1%}"
    for name, tokens in verdict.widths.items():
        yield f"  {name}: {tokens:,.0f} tokens/s a {device}, by formula"
    yield (
        f"  assumed: {chip.flops / 1e12:,.0f} Tflop/s bfloat16, {chip.bandwidth / 1e9:,.0f} GB/s HBM, "
        f"{chip.axis_bandwidth / 1e9:,.0f} GB/s along an axis, all at their peaks"
    )
    if not isinstance(verdict.compiled, Compiled):
        hidden = verdict.exposed_seconds < verdict.estimate.wire_seconds
        how = "hidden as far as in compiled programs of real size" if hidden else "never hidden"
        of_wire = f", communication is {how}" if verdict.estimate.wire_seconds else ""
        yield f"  estimated by formula: products take the chip's peak rate{of_wire}"
    yield f"  source: {chip.source}"


def _price(verdict: Verdict) -> str:
    """Returns what an update takes for what is in the host's memory."""
    if verdict.chip is None:
        return ""
    link, seconds = verdict.chip.host_bandwidth / 1e9, verdict.estimate.host_seconds
    return f": {seconds:.3f} s a step, {2 / link:.3f} s a GB, over {link:,.0f} GB/s each way"


def duration_of(seconds: float, of: float | None = None) -> str:
    """Returns seconds with a unit, milliseconds where the whole that they are part of is shorter than 0.1 s."""
    return f"{seconds:.3f} s" if (seconds if of is None else of) >= 0.1 else f"{seconds * 1e3:.3f} ms"


def _device(verdict: Verdict) -> str:
    halves = verdict.chip and verdict.chip.devices > 1
    if halves:
        return "device (half a chip)"
    return {"tpu": "chip", "gpu": "GPU"}.get(verdict.topology.platform, "device")


def _flops(count: float) -> str:
    return f"{count / 1e12:>12,.2f} Tflop" if count >= 1e10 else f"{count / 1e9:>12,.2f} Gflop"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"
